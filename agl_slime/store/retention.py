"""What a store keeps, and how much it holds."""

from __future__ import annotations

from dataclasses import dataclass

from agl_slime.support.agl import Span
from agl_slime.support.ranges import check_ranges

# A span's fields besides its attributes: ids, names, contexts, pydantic's own overhead. Measured once; exactness does
# not matter for a threshold.
_SPAN_OVERHEAD_BYTES = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What a store keeps. ``released_rollouts`` and ``released_bytes``: how much of what was released stays to be
    looked at, newest last. ``unreleased_bytes``: estimated span bytes that may wait to be released before no more
    rollouts are delivered; ``None`` is half of the machine's memory. A warning comes at 80 % of it.
    """

    released_rollouts: int = 2_000
    released_bytes: int = 256 * 2**20
    unreleased_bytes: int | None = None

    def __post_init__(self) -> None:
        check_ranges(
            self,
            ("released_rollouts released_bytes", lambda value: value >= 0, "0 (keep none) or more"),
            ("unreleased_bytes", lambda value: value >= 1, "at least 1 or None"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """``queued`` and ``running`` rollouts, ``stored`` ones in all, ``released`` ones that are still kept; span bytes
    are estimates. ``backpressure``: whether no rollouts are delivered because too much waits to be released."""

    queued: int
    running: int
    stored: int
    released: int
    span_bytes: int
    unreleased_bytes: int
    backpressure: bool


def estimate_span_bytes(span: Span) -> int:
    """Size of a span from its attributes' lengths alone, without walking them."""
    size = _SPAN_OVERHEAD_BYTES
    for key, value in span.attributes.items():
        size += len(key)
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, (list, tuple)):
            size += 32 * len(value)  # a boxed number and its place in the list
        else:
            size += 32
    return size
