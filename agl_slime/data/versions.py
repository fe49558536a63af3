"""The weight versions of a run, and the check that its samples come from them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agl_slime.types import Sample

# No rollout is this many versions behind.
_KEPT_VERSIONS = 1_000


class WeightVersions:
    """The weight versions that this run has pushed. Not thread-safe.

    Before the first push every version that an engine reports is accepted. After it only pushed versions are: another
    version means that another run updates the same engine.
    """

    def __init__(self) -> None:
        self.newest: int | None = None
        """The highest version so far, if versions are whole numbers."""
        self._current: str | None = None
        self._accepted: dict[str, None] = {}  # an ordered set
        self._pushed = False

    def push(self, version: str, *, named: bool = False) -> None:
        """Note that the run pushed this version, or starts with it; ``named``: the engine reports exactly this name."""
        self._pushed = self._pushed or named or self._current not in (None, version)
        self._current = version
        self._accept([version])

    def observe(self, samples: Iterable[Sample]) -> None:
        """Accept the versions of these samples, if nothing was pushed yet."""
        if not self._pushed:
            self._accept(_names(samples))

    def refusal(self, samples: Iterable[Sample]) -> str | None:
        """Why these samples cannot be trained on; ``None`` if they can."""
        foreign = [name for name in _names(samples) if name not in self._accepted] if self._pushed else []
        if not foreign:
            return None
        return (
            f"was sampled by weights of version {foreign[0]!r}, which this run did not push (its current version is "
            f"{self._current!r}): another run updates the same engine; give each run its own engines"
        )

    def state(self) -> dict[str, Any]:
        return {"current": self._current, "known": [*self._accepted], "pushed": self._pushed}

    def restore(self, state: dict[str, Any]) -> None:
        names, current, pushed = [*state["known"]], state["current"], state["pushed"]
        self._accept(names)
        self._current, self._pushed = current, pushed

    def _accept(self, names: Iterable[str]) -> None:
        for name in names:
            self._accepted[name] = None
            if name.isdecimal():
                self.newest = max(int(name), self.newest or 0)
        while len(self._accepted) > _KEPT_VERSIONS:
            del self._accepted[next(iter(self._accepted))]


def _names(samples: Iterable[Sample]) -> dict[str, None]:
    return {str(name): None for sample in samples for name in getattr(sample, "weight_versions", None) or ()}
