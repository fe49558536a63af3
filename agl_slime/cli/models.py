"""Resolve ``--model-path``, and ``agl-slime model``: a directory, ``smollm2``, or a name on the Hugging Face hub."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import tyro

from agl_slime.engine.client.describe import vocab_size_of
from agl_slime.errors import ConfigError
from agl_slime.report.files import RunDir
from agl_slime.support.terminal import print_line

_SMOLLM2 = "smollm2"
_CONVERT = "agl_slime.tools.smollm2.convert"  # imported when smollm2 is asked for
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # publisher/model
# The files that engine and trainer read; the same weights in other formats are not fetched.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "README.md"]


def model(name: tyro.conf.Positional[Path]) -> None:
    """Fetch a model and print the directory it is in, for --model-path or an SGLang server.

    Args:
        name: smollm2, a name on the Hugging Face hub, or the directory of a model or a run.
    """
    print_line(find_model(name, partial(print_line, to=sys.stderr)))


def check_model(model: Path) -> None:
    """Raise ``ConfigError`` or ``MissingDependencyError`` when ``model`` can be refused without a download."""
    if (model / "config.json").is_file() or _is_trained(model):
        return
    if str(model) == _SMOLLM2 and not model.exists():
        import_module(_CONVERT).check_smollm2()
    elif model.exists() or not _HUB_NAME.fullmatch(str(model)):
        fix = "give a directory that has one, smollm2, or a name on the hub"
        raise ConfigError(f"--model-path {model}: there is no Hugging Face checkpoint (no config.json); {fix}")


def check_tokenizer(model: Path, tokenizer: Any) -> None:
    """Raise ``ConfigError`` when ``tokenizer`` is empty or has ids outside of the model's vocabulary."""
    special = set(tokenizer.all_special_ids)
    if len(tokenizer) <= len(special):
        raise ConfigError(f"--model-path {model}: has no tokenizer; put the model's tokenizer files beside its weights")
    size = vocab_size_of(str(model))
    if size is not None and special and max(special) >= size:
        why = f"its tokenizer has special tokens up to id {max(special)}, and its config.json a vocabulary of {size}"
        raise ConfigError(f"--model-path {model}: {why}; resize the model, or give it its own tokenizer")


def find_model(model: Path, say: Callable[[str], None]) -> Path:
    """The directory of ``model``, downloaded or converted where necessary; of a run its newest weights. An existing
    directory takes precedence over the other meanings. ``say`` gets progress lines. Raises as ``check_model`` does, and
    ``ConfigError`` when the download fails."""
    check_model(model)
    if _is_trained(model):
        from agl_slime.cli.model_dir import model_of_run  # takes a second to import; --help should not

        return model_of_run(model)
    if (model / "config.json").is_file():
        return model.resolve()
    return import_module(_CONVERT).make_smollm2(say) if str(model) == _SMOLLM2 else _from_hub(str(model), say)


def _is_trained(path: Path) -> bool:
    """Whether ``path`` is the directory of a run with weights; its config.json holds settings, not a model's."""
    run = RunDir(path)
    return (run.model / "config.json").is_file() or run.checkpoints.is_dir()


def _from_hub(name: str, say: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download

    say(f"looking for {name} on the Hugging Face hub")
    try:
        directory = Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # of requests, httpx or the hub itself, depending on its version
        fix = "give a directory, or smollm2, which comes from the package registry"
        raise ConfigError(
            f"--model {name}: the download failed ({' '.join(str(error).split())[:200]}); {fix}"
        ) from error
    if not (directory / "config.json").is_file() or not any(directory.glob("*.safetensors")):
        raise ConfigError(f"--model {name}: it has no config.json and *.safetensors to train from; give another model")
    return directory
