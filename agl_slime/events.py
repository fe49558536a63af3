"""What a run reports, as small frozen events, and the protocols of those that take them.

Iterations count from 1; iteration 0 is what happens before the first step (the start validation). ``at`` is
``time.monotonic()``.
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
    """The run begins, after ``iteration`` where it is resumed. ``num_iterations`` and ``rollouts_per_iteration`` are
    what progress counts up to."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    output_dir: Path | None = None
    num_iterations: int | None = None
    rollouts_per_iteration: int | None = None
    iteration: int = 0


@dataclass(frozen=True, kw_only=True)
class PhaseStarted(_Timed):
    """The iteration enters a phase; ``rollouts`` is how many this phase runs, where that is not the usual number."""

    iteration: int
    phase: Phase
    rollouts: int | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutFinished(_Timed):
    """One rollout ended. ``outcome`` is the ledger's word and ``"failed"`` counts as a failure, with ``reason``;
    ``tokens`` are sampled tokens, ``turns`` model calls."""

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
    """So much of the iteration's training is done, ``share`` of it, from 0 to 1."""

    iteration: int
    share: float


@dataclass(frozen=True, kw_only=True)
class GroupsCollected:
    """The groups of an iteration (``agl_slime.groups.results.GroupResult``) before they are trained on."""

    iteration: int
    groups: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class GroupsRestored:
    """Groups that were ready before a restart, after ``iteration``, and wait to be trained on."""

    iteration: int
    groups: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class BatchTrained:
    """What an iteration was trained on: Samples, and for each of them the trainer's log-prob and the advantage of its
    tokens under the loss mask before the first step, ``[n_tokens]`` each; empty where the trainer does not tell."""

    iteration: int
    samples: Sequence[Any]
    log_probs: Sequence[Any] = ()
    advantages: Sequence[Any] = ()


@dataclass(frozen=True, kw_only=True)
class IterationFinished(_Timed):
    """An iteration is complete; the names of the metrics are those of ``agl_slime.metric_names``."""

    iteration: int
    metrics: Mapping[str, MetricValue]


@dataclass(frozen=True, kw_only=True)
class Warning:
    """Something the reader should know; a ``key`` is shown once, later ones are counted."""

    text: str
    key: str


@dataclass(frozen=True, kw_only=True)
class RunFinished(_Timed):
    """The run ended. ``reason`` is ``"finished"``, ``"interrupted"`` or the sentence that says why it stopped;
    ``summary`` goes into ``summary.json``, before what the reporters counted themselves."""

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
    """Takes the events of a run, one at a time, always from the same thread."""

    def handle(self, event: Event, /) -> None: ...


class Reporter(Observer, Protocol):
    """An observer behind ``Reporters``: an exception of ``handle`` drops it from the run, and nothing else."""

    def close(self) -> object:
        """Called once, also without a ``RunFinished`` before it."""
