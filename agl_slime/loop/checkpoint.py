"""Checkpoints of a run: consistent states of trainer, loop and data source, tied to the ledger.

``checkpoints/step_000010/`` contains ``trainer/`` (from ``Trainer.save``), ``loop.json``, ``data_source.json``,
``partial.jsonl`` (tokens sampled by rollouts in flight) and checksums. It is written atomically, after the ledger has
noted the step. A resume undoes later training and cancels later rollouts, so that no group is lost or trained on twice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agl_slime.data.ledger import Ledger
from agl_slime.data.source import GroupSource
from agl_slime.errors import ConfigError, TrainerError, format_exception
from agl_slime.loop.settings import LoopState
from agl_slime.loop.trainer import Trainer
from agl_slime.support.files import remove_directory, verify_checksums, whole_directory, write_checksums

logger = logging.getLogger(__name__)

_KEPT = 2  # newest checkpoints
_LOOP, _DATA_SOURCE, _TRAINER, _PARTIAL = "loop.json", "data_source.json", "trainer", "partial.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint as read from disk: states of loop and data source, and the directory for ``Trainer.load``."""

    path: Path
    loop: LoopState
    data_source: dict[str, Any]

    @property
    def trainer(self) -> Path:
        return self.path / _TRAINER

    @property
    def partial(self) -> Path:
        return self.path / _PARTIAL

    def rewind(self, ledger: Ledger, *, reported: Collection[str] | None = None) -> int:
        """Take the ledger back to this checkpoint; the run's reports name the instances ``reported``. Returns the
        number of rollouts that were in flight."""
        ready = [rollout_id for members in self.data_source.get("members") or [] for rollout_id in members]
        return ledger.resume(self.loop.iteration, ready=ready, reported=reported)


class CheckpointWriter:
    """Writes checkpoints into ``directory`` and keeps the newest two. ``save_partial(path)`` writes the tokens
    sampled by rollouts in flight."""

    def __init__(
        self,
        *,
        directory: Path,
        trainer: Trainer,
        source: GroupSource,
        save_partial: Callable[[Path], None] | None = None,
    ) -> None:
        self._directory, self._trainer, self._source = directory, trainer, source
        self._save_partial = save_partial

    def save(self, state: LoopState) -> Path:
        """Write a checkpoint; returns the trainer's directory in it. Raises ``TrainerError`` or ``OSError`` when it
        cannot be written; older checkpoints are then kept."""
        target = self._directory / f"step_{state.iteration:06d}"
        data_source = self._source.state(checkpoint=state.iteration)
        with whole_directory(target) as fresh:
            self._trainer.save(fresh / _TRAINER)
            (fresh / _LOOP).write_text(json.dumps(asdict(state)))
            (fresh / _DATA_SOURCE).write_text(json.dumps(data_source))
            if self._save_partial is not None:
                self._save_partial(fresh / _PARTIAL)
            write_checksums(fresh)
        steps = _steps(self._directory)
        now = steps.index(target)
        # later checkpoints are damaged ones: the run was resumed from an older one
        for old in (*steps[: max(now + 1 - _KEPT, 0)], *steps[now + 1 :]):
            remove_directory(old)
        return target / _TRAINER


def read_checkpoints(directory: Path) -> list[Checkpoint]:
    """The checkpoints in ``directory``, newest first. An unreadable one is skipped with a warning; raises
    ``ConfigError`` when all are unreadable."""
    checkpoints: list[Checkpoint] = []
    damaged: ConfigError | None = None
    for path in reversed(_steps(directory)):
        try:
            checkpoints.append(_read(path))
        except ConfigError as error:
            damaged = error
            logger.warning("%s; trying an older checkpoint.", error)
    if damaged is not None and not checkpoints:
        raise damaged
    return checkpoints


def load_newest(checkpoints: Sequence[Checkpoint], trainer: Trainer) -> Checkpoint:
    """Load the newest of ``checkpoints`` (newest first, at least one) that ``trainer`` can load, skipping others with a
    warning. Raises the newest checkpoint's ``TrainerError`` when it can load none."""
    first: TrainerError | None = None
    for checkpoint in checkpoints:
        try:
            trainer.load(checkpoint.trainer)
        except TrainerError as error:
            first = first or error
            logger.warning("%s; trying an older checkpoint.", error)
        else:
            return checkpoint
    assert first is not None
    raise first


def _read(path: Path) -> Checkpoint:
    try:
        verify_checksums(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    try:
        loop = json.loads((path / _LOOP).read_text())
        loop = LoopState(**{**loop, "reward_means": tuple(loop["reward_means"])})
        return Checkpoint(path=path, loop=loop, data_source={**json.loads((path / _DATA_SOURCE).read_text())})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is not a checkpoint of this version: {format_exception(error)}") from error


def _steps(directory: Path) -> list[Path]:
    """The checkpoint directories, oldest first; other files are ignored."""
    paths = [path for path in directory.glob("step_*") if path.name.removeprefix("step_").isdecimal() and path.is_dir()]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step_")))
