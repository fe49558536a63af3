"""A mean with its confidence interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_RESAMPLES = 10_000
_AT_ONCE = 4_000_000  # indices drawn at a time: 32 MB


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over ``tasks`` with its 95 % interval; no interval for fewer than two tasks."""

    mean: float
    low: float | None
    high: float | None
    tasks: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + (f" [{self.low:.3f}, {self.high:.3f}]" if self.low is not None else "")


def estimate(values: Sequence[float], *, seed: int = 0, level: float = 0.95) -> Estimate | None:
    """The mean of one value per task, with the percentile bootstrap's interval over tasks (Efron 1979); ``None`` for no
    values. When all values are equal the interval has width 0, which says little about other tasks."""
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
