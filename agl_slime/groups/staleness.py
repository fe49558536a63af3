"""How old the weights are that a sample was sampled with.

Weight versions are names; those that are whole numbers, as this package and slime give them, can be compared. The
policy's version is what the loop says, or the newest one that any sample has seen, whichever is newer.
"""

from __future__ import annotations

from collections.abc import Iterable

from agl_slime.types import Sample


class PolicyVersion:
    """The newest known version. ``max_staleness`` is how many versions behind it tokens may be; ``None`` is any number."""

    def __init__(self, *, max_staleness: int | None = None) -> None:
        self.max_staleness = max_staleness
        self.newest: int | None = None

    def advance(self, version: str | int | None) -> bool:
        """The policy is at ``version`` now, at least; whether that is news."""
        number = _number(version)
        if number is None or (self.newest is not None and number <= self.newest):
            return False
        self.newest = number
        return True

    def lag(self, samples: Iterable[Sample]) -> int:
        """Versions between the oldest token of ``samples`` and the policy; 0 where that is not known."""
        versions = [number for number in map(_number, versions_of(samples)) if number is not None]
        return max(0, self.newest - min(versions)) if versions and self.newest is not None else 0

    def too_old(self, samples: Iterable[Sample]) -> bool:
        """Whether some token of ``samples`` is older than allowed."""
        return self.max_staleness is not None and self.lag(samples) > self.max_staleness


def versions_of(samples: Iterable[Sample]) -> list[str]:
    """The weight versions that ``samples`` were sampled with, each once."""
    return list(
        dict.fromkeys(version for sample in samples for version in getattr(sample, "weight_versions", None) or ())
    )


def _number(version: str | int | None) -> int | None:
    try:
        return int(version) if version is not None else None
    except ValueError:
        return None
