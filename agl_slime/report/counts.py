"""Counts and series in constant memory."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

MOST_REASONS = 50
OTHER = "other reasons"
BARS = "▁▂▃▄▅▆▇█"


def count_reason(counter: Counter[str], reason: str) -> None:
    """Count a reason; when there are too many different ones (an error text used as a reason), the rest is counted
    together."""
    counter[reason if reason in counter or len(counter) < MOST_REASONS else OTHER] += 1


class Series:
    """The whole course of a value in at most ``2 * width`` means over equally many neighbours: when full, neighbours
    are joined."""

    def __init__(self, width: int = 40) -> None:
        if width < 1:
            raise ValueError(f"width must be at least 1, got {width}")
        self._limit = 2 * width
        self._per_point = 1
        self._points: list[float] = []
        self._sum = 0.0
        self._count = 0
        self.last: float | None = None

    def add(self, value: float) -> None:
        self.last = value
        self._sum += value
        self._count += 1
        if self._count == self._per_point:
            self._points.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
            if len(self._points) == self._limit:
                pairs = zip(self._points[::2], self._points[1::2], strict=True)
                self._points = [(left + right) / 2 for left, right in pairs]
                self._per_point *= 2

    @property
    def points(self) -> list[float]:
        """The means, the last one possibly over fewer values."""
        return [*self._points, self._sum / self._count] if self._count else list(self._points)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """At most ``width`` bars from the lowest to the highest of the values; equal values give bars of half height."""
    if len(values) > width:
        edges = [round(index * len(values) / width) for index in range(width + 1)]
        values = [sum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    if not values:
        return ""
    low, high = min(values), max(values)
    if high <= low:
        return BARS[3] * len(values)
    return "".join(BARS[min(int((value - low) / (high - low) * len(BARS)), len(BARS) - 1)] for value in values)
