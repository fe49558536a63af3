"""A mean with its confidence interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, pvariance
from typing import Any

# Tasks in the variance whose values are as spread as the mean allows. With two, intervals of skewed fractional rewards
# cover the mean in as few as 83 % of draws; with 16, in 93 % with a fifth more width (benchmarks/intervals.py).
_PRIOR_TASKS, _PRIOR_DIFFERENCES = 16, 2


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over ``tasks`` with its 95 % interval; no interval for fewer than two tasks."""

    mean: float
    low: float | None
    high: float | None
    tasks: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + (f" [{self.low:.3f}, {self.high:.3f}]" if self.low is not None else "")


def estimate(values: Sequence[float], *, rewards: Iterable[float] = (), differences: bool = False) -> Estimate | None:
    """The mean of one value per task and its interval for other tasks of the same kind; ``None`` for no values.

    For values of 0 and 1 it is Wilson's interval with continuity correction (Newcombe 1998, method 4), which covers the
    mean in at least 95 % of all draws of 16 tasks or more. For values between it is the same with an effective
    number of tasks: the number that gives the mean of zeros and ones the same variance (Korn and Graubard 1998). The
    interval lies between 0 and 1, the values and ``rewards``, all rewards known of such tasks; a reward beyond 0 and 1
    that no rollout has had is not known. Fewer than 16 tasks of which some have negative rewards, and ``differences``
    (within the range of rewards), have 0 in the middle.
    """
    if not len(values):
        return None
    n, mean = len(values), fmean(values)
    if n < 2:
        return Estimate(mean=mean, low=None, high=None, tasks=n)
    bounds = [0.0, 1.0, *rewards, *(() if differences else values)]
    least, most = min(bounds), max(bounds)
    if differences:
        most = max(most - least, *map(abs, values))
        least = -most
    elif least < 0 and n < _PRIOR_TASKS:
        most = max(most, -least)
        least = -most
    span = most - least
    share = min(1.0, max(0.0, (mean - least) / span))
    binary = share * (1 - share)  # the variance of as many zeros and ones
    weight = _PRIOR_DIFFERENCES if differences else _PRIOR_TASKS
    variance = (n * pvariance(values) / span / span + weight * binary) / (n + weight)
    low, high = _wilson(share, n * binary / variance if binary else n)
    # n draws have no task of such a share in 5 % of cases, and all its tasks may have the least or the greatest value
    unseen = 1 - 0.05 ** (1 / n)
    low, high = min(low, share - share * unseen), max(high, share + (1 - share) * unseen)
    return Estimate(mean=mean, low=least + span * low, high=least + span * high, tasks=n)


def paired_difference(
    first: Mapping[Any, float], second: Mapping[Any, float], *, rewards: Iterable[float] = ()
) -> Estimate | None:
    """The mean of ``second - first`` over the tasks that both have; ``None`` if there is no such task."""
    differences = [second[task] - first[task] for task in second if task in first]
    return estimate(differences, rewards=rewards, differences=True)


def _wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of ``share`` of ``n`` with continuity correction."""
    z = NormalDist().inv_cdf(0.975)

    def lower(p: float) -> float:
        if 2 * n * p <= 1:  # within the correction the formula gives the other root
            return 0.0
        root = math.sqrt(z * z - 2 - 1 / n + 4 * p * (n * (1 - p) + 1))
        return max(0.0, (2 * n * p + z * z - 1 - z * root) / (2 * (n + z * z)))

    return lower(share), 1 - lower(1 - share)
