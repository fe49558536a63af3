"""Which weights a run has pushed, and which its samples were sampled by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agl_slime.types import Sample

# Versions that are remembered; rollouts that are this far behind do not exist.
_REMEMBERED = 1_000


class WeightVersions:
    """The weight versions of a run by name, as far as somebody tells of them. Not thread-safe.

    Until the first push an engine may call its weights what it likes, and what it says counts as pushed. From then on
    only what was pushed does: somebody else who updates the same engine would have this run train on other weights.
    """

    def __init__(self) -> None:
        self.newest: int | None = None
        """The policy's version, at least, where versions are whole numbers."""
        self._current: str | None = None
        self._known: dict[str, None] = {}  # in the order of arrival
        self._pushed = False

    def push(self, version: str, *, named: bool = False) -> None:
        """The run has pushed this version, or begins with it; ``named``: the engine has it under this name."""
        self._pushed = self._pushed or named or self._current not in (None, version)
        self._current = version
        self._learn([version])

    def saw(self, samples: Iterable[Sample]) -> None:
        """These have been sampled."""
        if not self._pushed:
            self._learn(_names(samples))

    def refusal(self, samples: Iterable[Sample]) -> str | None:
        """Why these cannot be trained on; ``None`` when they can."""
        foreign = [name for name in _names(samples) if name not in self._known] if self._pushed else []
        if not foreign:
            return None
        return (
            f"was sampled by weights of version {foreign[0]!r}, which this run did not push (its last are "
            f"{self._current!r}): somebody else updates its engine; give each run engines of its own"
        )

    def state(self) -> dict[str, Any]:
        return {"current": self._current, "known": [*self._known], "pushed": self._pushed}

    def restore(self, state: dict[str, Any]) -> None:
        known, current, pushed = [*state["known"]], state["current"], state["pushed"]
        self._learn(known)
        self._current, self._pushed = current, pushed

    def _learn(self, names: Iterable[str]) -> None:
        for name in names:
            self._known[name] = None
            if name.isdecimal():
                self.newest = max(int(name), self.newest or 0)
        while len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]


def _names(samples: Iterable[Sample]) -> dict[str, None]:
    return {str(name): None for sample in samples for name in getattr(sample, "weight_versions", None) or ()}
