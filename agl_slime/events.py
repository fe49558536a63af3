"""The events of a run, and the protocols of their observers.

Iterations count from 1; iteration 0 is the start validation, before the first step. ``at`` is ``time.monotonic()``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Phase = Literal["collect", "train", "sync", "eval"]
Mode = Literal["train", "val"]
MetricValue = float | int | str | None


@dataclass(frozen=True, kw_only=True)
class _Timed:
    at: float = field(default_factory=time.monotonic, compare=False)


@dataclass(frozen=True, kw_only=True)
class RunStarted(_Timed):
    """The run begins, after ``iteration`` when it is resumed. ``num_iterations`` and ``rollouts_per_iteration`` are the
    totals of progress displays."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    output_dir: Path | None = None
    num_iterations: int | None = None
    rollouts_per_iteration: int | None = None
    iteration: int = 0


@dataclass(frozen=True, kw_only=True)
class PhaseStarted(_Timed):
    """The iteration enters a phase; ``rollouts`` is the number of rollouts in it, if not the usual one."""

    iteration: int
    phase: Phase
    rollouts: int | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutFinished(_Timed):
    """One rollout ended. ``outcome`` is the ledger's outcome; ``"failed"`` has a ``reason``. ``tokens`` counts sampled
    tokens, ``turns`` model calls."""

    iteration: int
    rollout_id: str
    outcome: str
    reason: str = ""
    reward: float | None = None
    tokens: int = 0
    turns: int = 0
    mode: Mode = "train"


@dataclass(frozen=True, kw_only=True)
class TrainingProgressed(_Timed):
    """``share`` (0 to 1) of the iteration's training is done."""

    iteration: int
    share: float


@dataclass(frozen=True, kw_only=True)
class GroupsCollected:
    """The groups of an iteration (``agl_slime.data.results.GroupResult``) before they are trained on."""

    iteration: int
    groups: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class GroupsRestored:
    """Groups that were ready before a restart, after ``iteration``, and are not trained yet."""

    iteration: int
    groups: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class BatchTrained:
    """An iteration's batch was trained on: its Samples, and for each the trainer's log-probs (before the first step)
    and advantages of the tokens under the loss mask, ``[n_tokens]`` each; empty when the trainer does not report
    them."""

    iteration: int
    samples: Sequence[Any]
    log_probs: Sequence[Any] = ()
    advantages: Sequence[Any] = ()


@dataclass(frozen=True, kw_only=True)
class IterationFinished(_Timed):
    """An iteration is complete; ``agl_slime.metric_names`` has the names of its metrics."""

    iteration: int
    metrics: Mapping[str, MetricValue]


@dataclass(frozen=True, kw_only=True)
class Warning:
    """A warning for the user; the first with a ``key`` is shown, later ones are counted."""

    text: str
    key: str


@dataclass(frozen=True, kw_only=True)
class RunFinished(_Timed):
    """The run ended. ``reason`` is ``"finished"``, ``"interrupted"`` or a sentence on why it stopped; ``summary`` goes
    into ``summary.json``, before the reporters' counts."""

    summary: Mapping[str, Any] = field(default_factory=dict)
    reason: str = "finished"


Event = (
    RunStarted
    | PhaseStarted
    | RolloutFinished
    | GroupsCollected
    | GroupsRestored
    | TrainingProgressed
    | BatchTrained
    | IterationFinished
    | Warning
    | RunFinished
)


class Observer(Protocol):
    """Handles the events of a run, one at a time, always on the same thread."""

    def handle(self, event: Event, /) -> None: ...


class Reporter(Observer, Protocol):
    """An observer behind ``Reporters``: an exception in ``handle`` removes it, and the run continues."""

    def close(self) -> object:
        """Called once, even when there was no ``RunFinished``."""
