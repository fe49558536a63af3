"""The tiny policy: a Qwen3 model of about 128,000 parameters and its tokenizer, made locally in seconds and saved as an
ordinary Hugging Face checkpoint.

It needs no download and no GPU, learns the shipped tasks in under a minute on a laptop, and a real SGLang serves the
same directory. The same seed, demonstrations and settings give the same policy on one machine and library version.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agl_slime.demo.formats import DEFAULT_SOURCES, DemonstrationSource
from agl_slime.errors import ConfigError, MissingDependencyError

try:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as transformers_logging

    from agl_slime.demo.tokenizer import train_tokenizer
    from agl_slime.demo.warmup import WarmupSettings, warm_up
except ImportError as error:
    raise MissingDependencyError(
        'making the tiny policy needs torch and transformers: pip install "agl-slime[local]"'
    ) from error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPEC_FILE = "agl_slime_policy.json"
"""Beside the checkpoint: the hash of what it was made from, and what the warm-up reported."""

_FORMAT = 1  # raise when the code changes what the same spec gives

# General words fill the vocabulary, so that merges are not spent on the random letters of keys: those stay single
# tokens, which is what makes them quick to copy.
_GENERAL_TEXT = (
    "The model reads the question and writes an answer. When it needs to know something, it can use a tool: it sends a name and a list of "
    "arguments, waits for the result, and then goes on from there. A good\n"
    "answer is short and correct. If the first try fails, look at the error message, think about what went wrong, and try again with other "
    "values. Please explain each step before you give the final number.\n"
    "You are a helpful assistant. Here is some text for you to read, check and change. Write the sum of these numbers, count the words in "
    "that line, return the last item, or say which of the two is larger.\n"
    "Every user has a file with data, code, time and place; every file has a first and a second part. We can add, find, open, close, start, "
    "stop, sort, reverse or search them by key, value, type or order."
)


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """The model's shape and how it is warmed up.

    Two layers and hidden 64 are the smallest shape that learned to copy (one layer, or hidden 48, did not).
    ``initializer_range`` is four times the usual one: at 0.02 the copying had not formed after 400 steps. A low
    ``rope_theta`` suits the short contexts here and speeds it up.
    """

    vocab_size: int = 460
    hidden_size: int = 64
    intermediate_size: int = 192
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    initializer_range: float = 0.08
    rope_theta: float = 1000.0
    max_position_embeddings: int = 4096
    """The context length in tokens, prompt and response together."""
    warmup: WarmupSettings = field(default_factory=WarmupSettings)


def make_policy(
    directory: str | os.PathLike[str],
    *,
    seed: int = 0,
    demonstrations: DemonstrationSource | None = None,
    settings: PolicySettings | None = None,
) -> Path:
    """Make the tiny policy in ``directory`` (created when missing) and return its path; a directory that already holds
    the same policy is returned as it is.

    ``demonstrations`` is what the warm-up trains on, by default the lookup task. The directory appears complete or not
    at all. Raises ``ConfigError`` when it exists and holds something else, ``TrainerError`` when the warm-up does not
    pass its probe.
    """
    target = Path(directory).expanduser().resolve()
    source = demonstrations if demonstrations is not None else DEFAULT_SOURCES[0]
    settings = settings or PolicySettings()
    spec = _spec(seed, source, settings)
    if target.exists() and any(target.iterdir()):
        found = _read_spec(target)
        if found == spec:
            return target
        if found is None:
            raise ConfigError(
                f"the policy's directory {target} is not empty and holds no tiny policy: name another directory"
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _make(part, spec, seed, source, settings)
        os.chmod(part, 0o755)  # mkdtemp makes it private; a server may run as another user
        if target.exists():
            shutil.rmtree(target)
        try:
            os.replace(part, target)
        except OSError:
            if _read_spec(target) != spec:  # another process made the same policy meanwhile
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def make_tokenizer(
    source: DemonstrationSource, *, vocab_size: int = 460, max_length: int = 4096
) -> PreTrainedTokenizerBase:
    """The tokenizer for ``source``; the two default tasks are always among its texts."""
    texts = [_GENERAL_TEXT] * 8
    for each in (*DEFAULT_SOURCES, source):
        # few conversations: the fixed wording repeats in all of them, the random keys do not
        for quality in ("clean", "imperfect"):
            for conversation in each.demonstrations(random.Random(0), 16, quality=quality):
                for message in conversation:
                    texts += [str(message["role"]), str(message["content"])]
    return train_tokenizer(texts, vocab_size=vocab_size, max_length=max_length)


def _make(directory: Path, spec: str, seed: int, source: DemonstrationSource, settings: PolicySettings) -> None:
    tokenizer = make_tokenizer(source, vocab_size=settings.vocab_size, max_length=settings.max_position_embeddings)
    shape: dict[str, Any] = {
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.hidden_size,
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": settings.num_hidden_layers,
        "num_attention_heads": settings.num_attention_heads,
        "num_key_value_heads": settings.num_key_value_heads,
        "head_dim": settings.head_dim,
        "initializer_range": settings.initializer_range,
        "rope_theta": settings.rope_theta,
        "max_position_embeddings": settings.max_position_embeddings,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    config = Qwen3Config(**shape)  # rope_theta is a field in transformers 4 and a converted keyword in 5
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
        report = warm_up(model, tokenizer, source, seed=seed, settings=settings.warmup)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    with _no_progress_bar():
        model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / SPEC_FILE).write_text(
        json.dumps({"spec": spec, "seed": seed, "warmup": dataclasses.asdict(report)}, indent=2) + "\n",
        encoding="utf-8",
    )


def _spec(seed: int, source: DemonstrationSource, settings: PolicySettings) -> str:
    # the conversations themselves stand for the source: an edited task makes another policy
    sample = [source.demonstrations(random.Random(1), 16, quality=quality) for quality in ("clean", "imperfect")]
    text = json.dumps([_FORMAT, seed, dataclasses.asdict(settings), sample], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_spec(directory: Path) -> str | None:
    try:
        return str(json.loads((directory / SPEC_FILE).read_text(encoding="utf-8"))["spec"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    # tensors this small are slower on several threads, and sums in another order would give another policy
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
