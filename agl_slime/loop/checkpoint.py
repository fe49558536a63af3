"""Checkpoints of a run: the trainer, the loop and the data source as they were at one moment, tied to the ledger's
account of it.

``checkpoints/step_000010/`` holds ``trainer/`` (what ``Trainer.save`` writes), ``loop.json`` and ``data_source.json``.
It appears as a whole or not at all, after the ledger has noted the step. A process that is killed at any moment leaves
a newest checkpoint that the ledger knows; what was trained on or in flight after it is taken back when the run goes on
from there, so no group is lost and none is trained on twice.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from agl_slime.datasource.source import AGLDataSource
from agl_slime.datasource.state import DataSourceState
from agl_slime.errors import ConfigError
from agl_slime.groups.ledger_disk import PersistentLedger
from agl_slime.loop.online import LoopState
from agl_slime.support.files import whole_directory
from agl_slime.trainers.base import Trainer

T = TypeVar("T")

_LOOP, _DATA_SOURCE, _TRAINER = "loop.json", "data_source.json", "trainer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was read: the loop's and the data source's state, and the directory for ``Trainer.load``."""

    path: Path
    loop: LoopState
    data_source: DataSourceState

    @property
    def trainer(self) -> Path:
        return self.path / _TRAINER

    def rewind(self, ledger: PersistentLedger) -> int:
        """Take the ledger back to this checkpoint, for a run whose rollouts were in the process that has ended; returns
        how many were in flight."""
        kept = [rollout_id for members in self.data_source.members or [] for rollout_id in members]
        return ledger.resume(self.loop.iteration, kept=kept)


class CheckpointWriter:
    """Writes checkpoints of a run into ``directory`` and keeps the newest ``keep``."""

    def __init__(
        self, *, directory: Path, trainer: Trainer, source: AGLDataSource, ledger: PersistentLedger, keep: int = 2
    ) -> None:
        self._directory = directory
        self._trainer = trainer
        self._source = source
        self._ledger = ledger
        self._keep = keep

    def save(self, state: LoopState) -> None:
        """Write one; nothing trains meanwhile. Raises ``TrainerError`` or ``OSError`` when it cannot be written; the
        older ones are kept then."""
        target = _path(self._directory, state.iteration)
        with self._source.changed:  # nothing is handed out between the two
            held = self._source.state()
            self._ledger.checkpoint(state.iteration)
        with whole_directory(target) as fresh:
            self._trainer.save(fresh / _TRAINER)
            (fresh / _LOOP).write_text(json.dumps(asdict(state)))
            (fresh / _DATA_SOURCE).write_text(json.dumps(asdict(held)))
        for old in _steps(self._directory)[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)


def latest_checkpoint(directory: Path) -> Checkpoint | None:
    """The newest checkpoint in ``directory``; ``None`` when there is none yet. Raises ``ConfigError`` when it cannot be
    read."""
    steps = _steps(directory)
    if not steps:
        return None
    path = steps[-1]
    loop = _read(path / _LOOP, lambda given: LoopState(**{**given, "reward_means": tuple(given["reward_means"])}))
    return Checkpoint(
        path=path, loop=loop, data_source=_read(path / _DATA_SOURCE, lambda given: DataSourceState(**given))
    )


def _read(path: Path, make: Callable[[dict[str, Any]], T]) -> T:
    try:
        return make(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} is not part of a checkpoint of this version: {type(error).__name__}: {error}"
        ) from error


def _path(directory: Path, step: int) -> Path:
    return directory / f"step_{step:06d}"


def _steps(directory: Path) -> list[Path]:
    """The whole checkpoints, oldest first."""
    return sorted(
        (path for path in directory.glob("step_*") if path.is_dir()),
        key=lambda path: int(path.name.removeprefix("step_")),
    )
