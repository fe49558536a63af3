"""The loop's settings, its state in a checkpoint, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agl_slime.errors import ConfigError
from agl_slime.support.ranges import check_ranges

_MOST = 100_000  # more prompts or rollouts would take hours to enqueue


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """Settings of a loop: batch sizes, staleness, and when to validate, save and stop."""

    num_iterations: int = 40
    """Total training iterations (collect, train, sync)."""
    rollout_batch_size: int = 16
    """Prompts per iteration: one group each."""
    n_samples_per_prompt: int = 4
    """Rollouts per prompt: the group within which advantages are computed."""
    rollout_timeout_s: float = 600.0
    """Seconds after which a rollout is cancelled and counts as failed."""
    max_attempts: int = 1
    """Attempts of a rollout, the first included."""
    eval_interval: int = 0
    """Iterations between validations, which also run before the first iteration and after the last; 0 is never."""
    eval_rollouts: int = 32
    """Rollouts per validation."""
    max_empty_iterations: int = 3
    """Stop after this many iterations in a row without a group to train on."""
    failure_patience_s: float = 600.0
    """Seconds for which the run tries other tasks, with pauses, when all rollouts fail after earlier successes."""
    max_replaced_groups: int | None = None
    """Most dropped groups replaced per iteration; None is ``rollout_batch_size``, eight times it with
    ``group_pilot``. While every rollout fails, none is replaced."""
    save_interval: int = 10
    """Iterations between checkpoints; the last iteration writes one, too."""
    max_staleness: int = 0
    """Most weight versions that tokens may be behind the policy that trains on them. 0 is synchronous training; above 0
    it is asynchronous: rollouts continue while a batch is trained on, within that limit, and a training function must
    take each batch whole."""
    deterministic: bool = False
    """Two runs with one seed are equal to the last bit, also when they are asynchronous, or killed and resumed: weights
    are updated when no rollout is in flight, batches are in the order of draw, and the embedded engine computes each
    answer as if it were alone (docs/deterministic.md)."""
    group_pilot: int = 0
    """Rollouts with which a group begins: the others follow if their rewards differ (or, with task_sampling learnable,
    if the task's did), else the group is dropped; 0 is the whole group at once."""
    task_sampling: Literal["uniform", "learnable"] = "uniform"
    """Order of the tasks: uniform (shuffled epochs, or as they come), or learnable (by the probable variance of a
    group's rewards; each task comes again within four draws per task)."""
    seed: int = 0
    """Seed of tasks, policy and trainer."""

    @property
    def learnable(self) -> int:
        """Groups per policy update, if tasks are sampled by what they can still teach; else 0."""
        return self.rollout_batch_size if self.task_sampling == "learnable" else 0

    def __post_init__(self) -> None:
        check_ranges(
            self,
            ("num_iterations rollout_batch_size n_samples_per_prompt", lambda value: value >= 1, "at least 1"),
            ("rollout_batch_size n_samples_per_prompt", lambda value: value <= _MOST, f"at most {_MOST}"),
            ("max_attempts eval_rollouts max_empty_iterations save_interval", lambda value: value >= 1, "at least 1"),
            ("max_replaced_groups", lambda value: value >= 0, "0 (none) or more"),
            ("eval_interval", lambda value: value >= 0, "0 (never) or more"),
            ("task_sampling", ("uniform", "learnable").__contains__, "'uniform' or 'learnable'"),
            ("group_pilot", lambda value: value == 0 or value >= 2, "0 (none) or at least 2"),
            ("max_staleness", lambda value: value >= 0, "0 (synchronous) or more"),
            ("failure_patience_s", lambda value: value >= 0, "0 (none) or more seconds"),
            ("rollout_timeout_s", lambda value: value > 0, "above 0 seconds"),
        )
        if self.group_pilot >= max(2, self.n_samples_per_prompt):
            sizes = f"group_pilot is {self.group_pilot} and n_samples_per_prompt {self.n_samples_per_prompt}"
            raise ConfigError(f"{sizes}; set it below, or to 0 for whole groups")
        if self.learnable and self.n_samples_per_prompt == 1:
            why = "task_sampling is 'learnable' and n_samples_per_prompt 1: a group of one has no variance"
            raise ConfigError(f"{why}; set it to 2 or more, or task_sampling to 'uniform'")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """A loop's state after ``iteration``, saved beside the states of trainer and data source. ``version`` is the weight
    version, ``validations`` the number of validations so far, ``reward_means`` has one entry per iteration.
    ``val_first`` are the rewards of the first validation by task (``metrics.reward_by_task``).
    ``admitted``: instances admitted and not yet trained on, each with the number of iterations finished at
    admission. ``sampling``: of a task sampler, ``TaskCursor.sampling_state``."""

    iteration: int = 0
    version: str = "0"
    validations: int = 0
    val_first: Mapping[str, float] = field(default_factory=dict)
    reward_means: tuple[float, ...] = ()
    admitted: Mapping[str, int] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a finished run. ``reward_means`` has one entry per iteration."""

    iterations: int
    reward_means: tuple[float, ...]
    metrics: Mapping[str, Any] = field(default_factory=dict)
