"""Retention limits and usage of a store."""

from __future__ import annotations

from dataclasses import dataclass

from agl_slime.support.agl import Span
from agl_slime.support.ranges import check_ranges

# Measured size of a span without attributes: ids, names, contexts, pydantic's overhead. A threshold needs no exact one.
_SPAN_OVERHEAD_BYTES = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Limits of a store's memory. Sizes are estimates of span bytes."""

    released_rollouts: int = 2_000
    """Released rollouts that are kept for inspection."""
    released_bytes: int = 256 * 2**20
    """Their size."""
    unreleased_bytes: int | None = None
    """Size of unreleased rollouts above which no more rollouts are delivered; ``None`` = half of the machine's memory.
    A warning is logged at 80 %."""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            ("released_rollouts released_bytes", lambda value: value >= 0, "0 (keep none) or more"),
            ("unreleased_bytes", lambda value: value >= 1, "at least 1 or None"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """Numbers of rollouts, estimated span bytes, and whether deliveries are stopped (``backpressure``)."""

    queued: int
    running: int
    stored: int
    """All rollouts in the store."""
    released: int
    """Released ones that are still kept."""
    span_bytes: int
    unreleased_bytes: int
    backpressure: bool


def estimate_span_bytes(span: Span) -> int:
    """Estimate the size of a span from the lengths of its attributes, without walking lists."""
    size = _SPAN_OVERHEAD_BYTES
    for key, value in span.attributes.items():
        size += len(key)
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, (list, tuple)):
            size += 32 * len(value)  # a boxed number and its slot in the list
        else:
            size += 32
    return size
