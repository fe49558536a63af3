"""What samples of tasks add up to: means, pass@k, and intervals by bootstrap over tasks.

A sample without a reward has failed and counts nowhere but among the failures; it is never a reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

_RESAMPLES = 10_000
_AT_ONCE = 4_000_000  # indices drawn at a time: 32 MB

TaskRewards = Mapping[int, Sequence[float]]
"""The rewards of each task's samples, by the task's number; empty where all have failed."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over ``tasks`` with its 95 % interval; no interval where fewer than two tasks say anything."""

    mean: float
    low: float | None
    high: float | None
    tasks: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + (f" [{self.low:.3f}, {self.high:.3f}]" if self.low is not None else "")


def pass_at_k(*, samples: int, passed: int, k: int) -> float:
    """The chance that of ``k`` samples at least one passes, estimated without bias from ``passed`` of ``samples``
    (arXiv:2107.03374): 1 - C(samples - passed, k) / C(samples, k). Raises ``ValueError`` for fewer samples than k."""
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(f"pass@{k} of {passed} passed in {samples} samples: k must be from 1 to the samples")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


def estimate(values: Sequence[float], *, seed: int = 0, level: float = 0.95) -> Estimate | None:
    """The mean of one value per task, with the percentile bootstrap's interval over tasks (Efron 1979); ``None`` for no
    values. Where all values are equal the interval has no width, which says little about tasks that were not drawn."""
    if not len(values):
        return None
    data = np.asarray(values, dtype=np.float64)
    if len(data) < 2:
        return Estimate(mean=float(data.mean()), low=None, high=None, tasks=len(data))
    rng, means = np.random.default_rng(seed), []
    rows = max(1, min(_RESAMPLES, _AT_ONCE // len(data)))
    for start in range(0, _RESAMPLES, rows):
        drawn = rng.integers(0, len(data), (min(rows, _RESAMPLES - start), len(data)))
        means.append(data[drawn].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(mean=float(data.mean()), low=float(low), high=float(high), tasks=len(data))


def task_means(rewards: TaskRewards) -> dict[int, float]:
    """The mean reward of each task that has one."""
    return {task: math.fsum(own) / len(own) for task, own in rewards.items() if own}


def pass_rates(rewards: TaskRewards, *, limit: float, k: int) -> dict[int, float]:
    """pass@k of each task that has ``k`` samples with a reward; one passes from the reward ``limit`` on."""
    return {
        task: pass_at_k(samples=len(own), passed=sum(reward >= limit for reward in own), k=k)
        for task, own in rewards.items()
        if len(own) >= k
    }


def sum_up(rewards: TaskRewards, *, limit: float, k: int, seed: int = 0) -> dict[str, Any]:
    """Mean reward, pass@1 and pass@k, each with its interval and the number of tasks that it is over."""
    found: dict[str, Any] = {"reward": estimate([*task_means(rewards).values()], seed=seed)}
    for size in sorted({1, k}):
        found[f"pass@{size}"] = estimate([*pass_rates(rewards, limit=limit, k=size).values()], seed=seed)
    return {name: None if one is None else asdict(one) for name, one in found.items()}


def compare(before: TaskRewards, after: TaskRewards, *, limit: float, seed: int = 0) -> dict[str, Any]:
    """The paired differences ``after - before`` of the tasks that both have: of the mean reward and of pass@1, and the
    tasks whose pass rate came from below a half to a half or more (``gained``), and the other way (``lost``)."""
    found: dict[str, Any] = {}
    for name, one, other in (
        ("reward", task_means(before), task_means(after)),
        ("pass@1", pass_rates(before, limit=limit, k=1), pass_rates(after, limit=limit, k=1)),
    ):
        both = sorted(one.keys() & other.keys())
        difference = estimate([other[task] - one[task] for task in both], seed=seed)
        found[name] = None if difference is None else asdict(difference)
        if name == "pass@1":
            found["gained"] = [task for task in both if one[task] < 0.5 <= other[task]]
            found["lost"] = [task for task in both if other[task] < 0.5 <= one[task]]
    return found
