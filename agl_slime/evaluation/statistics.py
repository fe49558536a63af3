"""What samples of tasks add up to: means, pass@k, and intervals by bootstrap over tasks.

A sample without a reward has failed and counts nowhere but among the failures; it is never a reward of 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agl_slime.support.intervals import estimate

TaskRewards = Mapping[int, Sequence[float]]
"""The rewards of each task's samples, by the task's number; empty where all have failed."""


def pass_at_k(*, samples: int, passed: int, k: int) -> float:
    """The chance that of ``k`` samples at least one passes, estimated without bias from ``passed`` of ``samples``
    (arXiv:2107.03374): 1 - C(samples - passed, k) / C(samples, k). Raises ``ValueError`` for fewer samples than k."""
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(f"pass@{k} of {passed} passed in {samples} samples: k must be from 1 to the samples")
    return 1.0 - math.comb(samples - passed, k) / math.comb(samples, k)


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
