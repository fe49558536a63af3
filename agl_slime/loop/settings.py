"""What a loop is told, where it stands, and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agl_slime.support.ranges import check_ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """``rollout_batch_size`` prompts of ``n_samples_per_prompt`` rollouts make an iteration. ``rollout_timeout_s`` and
    ``max_attempts`` go into each rollout's configuration.

    ``eval_interval``: a validation of ``eval_tasks`` rollouts before the first iteration, after every so many, and at
    the end; 0 is never. ``max_empty_iterations``: iterations in a row that give nothing to train on before the run
    stops. ``failure_patience_s``: how long other tasks are tried, with pauses, while all rollouts fail that worked
    before. ``max_replaced_groups``: dropped groups that are replaced in an iteration; by default
    ``rollout_batch_size``, and 0 replaces none. While every rollout fails, nothing is replaced. ``save_interval``:
    ``save_fn`` is called after every so many iterations and when the run ends. ``max_staleness``: most weight versions
    that tokens may be behind those that train on them; above 0 training is asynchronous, and
    ``slime_train_fn`` has to take each batch whole.
    """

    num_iterations: int = 40
    rollout_batch_size: int = 16
    n_samples_per_prompt: int = 4
    rollout_timeout_s: float = 600.0
    max_attempts: int = 1
    eval_interval: int = 0
    eval_tasks: int = 32
    max_empty_iterations: int = 3
    failure_patience_s: float = 600.0
    max_replaced_groups: int | None = None
    save_interval: int = 10
    max_staleness: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_ranges(
            self,
            ("num_iterations rollout_batch_size n_samples_per_prompt", lambda value: value >= 1, "at least 1"),
            ("max_attempts eval_tasks max_empty_iterations save_interval", lambda value: value >= 1, "at least 1"),
            ("max_replaced_groups", lambda value: value >= 0, "0 (none) or more"),
            ("eval_interval", lambda value: value >= 0, "0 (never) or more"),
            ("max_staleness", lambda value: value >= 0, "0 (serial) or more"),
            ("failure_patience_s", lambda value: value >= 0, "0 (none) or more seconds"),
            ("rollout_timeout_s", lambda value: value > 0, "above 0 seconds"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """Where a loop stands after ``iteration``: what a run needs to go on, beside the states of its trainer and its data
    source. ``version`` is that of the weights, ``validations`` how often was validated;
    ``reward_means`` is what the result goes on from. ``admitted``: the instances that were admitted ahead and are not
    trained on, each with the iterations that had been finished then."""

    iteration: int = 0
    version: str = "0"
    validations: int = 0
    reward_means: tuple[float, ...] = ()
    admitted: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a finished run returns. ``reward_means`` has one entry per iteration."""

    iterations: int
    reward_means: tuple[float, ...]
    metrics: Mapping[str, Any] = field(default_factory=dict)
