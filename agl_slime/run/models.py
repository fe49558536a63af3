"""Where the model of a run is: a directory, ``smollm2``, or a name on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError
from agl_slime.report.files import RunDir
from agl_slime.run.smollm2 import make_smollm2, require_gguf, smollm2_directory
from agl_slime.sglang.describe import vocab_size_of

_SMOLLM2 = "smollm2"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")  # who published it, and its name
# What engine and trainer read; the same weights in other forms are left there.
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "README.md"]


def check_model(model: Path) -> None:
    """Raise ``ConfigError`` or ``MissingDependencyError`` when ``find_model`` could not find ``model``, as far as that
    can be told at once."""
    if (model / "config.json").is_file() or _is_trained(model):
        return
    if str(model) == _SMOLLM2 and not model.exists():
        if smollm2_directory() is None:
            require_gguf()
    elif model.exists() or not _HUB_NAME.fullmatch(str(model)):
        why = "there is no Hugging Face checkpoint (no config.json); leave the flag out for the tiny policy"
        raise ConfigError(f"--model-path {model}: {why}")


def check_tokenizer(model: Path, tokenizer: Any) -> None:
    """Raise ``ConfigError`` when no rollout could be sampled with the ``tokenizer`` that ``model`` came with."""
    special = set(tokenizer.all_special_ids)
    if len(tokenizer) <= len(special):
        raise ConfigError(f"--model-path {model}: holds no tokenizer; put the files of the model's beside its weights")
    size = vocab_size_of(str(model))
    if size is not None and special and max(special) >= size:
        why = f"its tokenizer has special tokens up to id {max(special)}, and its config.json a vocabulary of {size}"
        raise ConfigError(f"--model-path {model}: {why}; resize the model, or give it its own tokenizer")


def find_model(model: Path, say: Callable[[str], None]) -> Path:
    """The directory of ``model``, with what is not on this machine fetched first; of a run its newest weights. A
    directory of that name comes before the other meanings. ``say`` is told what takes a while. Raises as
    ``check_model`` does, and ``ConfigError`` when it cannot be fetched."""
    check_model(model)
    if _is_trained(model):
        from agl_slime.run.model_dir import model_of_run  # takes a second to import; --help should not

        return model_of_run(model)
    if (model / "config.json").is_file():
        return model.resolve()
    return make_smollm2(say) if str(model) == _SMOLLM2 else _from_hub(str(model), say)


def _is_trained(path: Path) -> bool:
    """Whether it is the directory of a run that has weights; its config.json are settings, and no model's."""
    run = RunDir(path)
    return (run.model / "config.json").is_file() or run.checkpoints.is_dir()


def _from_hub(name: str, say: Callable[[str], None]) -> Path:
    from huggingface_hub import snapshot_download

    say(f"looking for {name} on the Hugging Face hub")
    try:
        found = Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # of requests, httpx or the hub's own, by its version; there is nothing else in here
        fix = "give a directory, or smollm2, which comes from the package registry"
        raise ConfigError(
            f"--model {name}: the hub did not give it ({' '.join(str(error).split())[:200]}); {fix}"
        ) from error
    if not (found / "config.json").is_file() or not any(found.glob("*.safetensors")):
        raise ConfigError(f"--model {name}: it has no config.json and *.safetensors to train from; give another model")
    return found
