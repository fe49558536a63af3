"""Statistics of sampled tasks: mean rewards and pass@k, with intervals over tasks.

A sample without a reward counts as failed and enters no mean; it is never a reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agl_slime.support.intervals import Estimate, estimate, paired_difference

TaskRewards = Mapping[int, Sequence[float]]
"""The rewards of each task's samples by task number; empty where all failed."""


def pass_at_k(*, samples: int, passed: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of ``k`` samples passes (arXiv:2107.03374):
    1 - C(samples - passed, k) / C(samples, k). Raises ``ValueError`` for fewer samples than k."""
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(f"pass@{k} of {passed} passed in {samples} samples: k must be from 1 to the samples")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def task_means(rewards: TaskRewards) -> dict[int, float]:
    """The mean reward of each task that has one."""
    return {task: math.fsum(values) / len(values) for task, values in rewards.items() if values}


def pass_rates(rewards: TaskRewards, *, limit: float, k: int) -> dict[int, float]:
    """pass@k of each task with at least ``k`` rewards; a sample passes with a reward of ``limit`` or more."""
    return {
        task: pass_at_k(samples=len(values), passed=sum(reward >= limit for reward in values), k=k)
        for task, values in rewards.items()
        if len(values) >= k
    }


def sum_up(rewards: TaskRewards, *, limit: float, k: int) -> dict[str, Any]:
    """Mean reward, pass@1 and pass@k, each with its interval and number of tasks."""
    rates = {f"pass@{size}": pass_rates(rewards, limit=limit, k=size) for size in sorted({1, k})}
    mean = estimate([*task_means(rewards).values()], rewards=_flat(rewards))
    return {"reward": _fields(mean), **{name: _fields(estimate([*rate.values()])) for name, rate in rates.items()}}


def compare(old: TaskRewards, new: TaskRewards, *, limit: float) -> dict[str, Any]:
    """Paired differences ``new - old`` over common tasks, of mean reward and pass@1; and the tasks whose pass rate
    rose to a half or more (``gained``) or fell below a half (``lost``)."""
    old_rates, new_rates = (pass_rates(rewards, limit=limit, k=1) for rewards in (old, new))
    common = sorted(old_rates.keys() & new_rates.keys())
    return {
        "reward": _fields(paired_difference(task_means(old), task_means(new), rewards=[*_flat(old), *_flat(new)])),
        "pass@1": _fields(paired_difference(old_rates, new_rates)),
        "gained": [task for task in common if old_rates[task] < 0.5 <= new_rates[task]],
        "lost": [task for task in common if new_rates[task] < 0.5 <= old_rates[task]],
    }


def _flat(rewards: TaskRewards) -> list[float]:
    return [reward for values in rewards.values() for reward in values]


def _fields(value: Estimate | None) -> dict[str, Any] | None:
    return None if value is None else asdict(value)
