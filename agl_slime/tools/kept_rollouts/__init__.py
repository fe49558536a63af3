"""The lines of ``rollouts.jsonl``, read: rollouts, and the tokens of their Samples as arrays."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from agl_slime.errors import ConfigError
from agl_slime.report.files import RunDir, iter_jsonl


def unpack(text: str, kind: str = "<f4") -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), kind)


class TokenColumns(NamedTuple):
    """The ids of a Sample that ``describe_tokens`` described, the length of its prompt, and of each response token the
    loss mask and the log-probs of engine and trainer."""

    ids: np.ndarray
    prompt_length: int
    mask: np.ndarray
    engine: np.ndarray
    trainer: np.ndarray


def read_tokens(described: Mapping[str, Any]) -> TokenColumns:
    ids, start = unpack(described["tokens"], "<i4"), int(described["prompt_length"])
    mask = np.zeros(len(ids) - start, dtype=bool)
    for first, end in described["trained"]:
        mask[first:end] = True
    log_probs = (unpack(described[f"{side}_log_probs"]) for side in ("engine", "trainer"))
    return TokenColumns(ids, start, mask, *log_probs)


def kept_rollouts(run_dir: Path) -> Iterator[Mapping[str, Any]]:
    """The rollouts of a run's ``rollouts.jsonl``, each once. Raises ``ConfigError`` without the file."""
    run = RunDir(run_dir)
    if not run.rollouts.is_file():
        raise ConfigError(f"{run_dir}: there is no rollouts.jsonl; train with --keep-rollouts all")
    yielded = set[Any]()
    for line in iter_jsonl(run.rollouts):
        name = line.get("rollout_id")
        if isinstance(line.get("messages"), list) and isinstance(line.get("samples"), list) and name not in yielded:
            yielded |= {name} - {None}
            yield line
