"""Which ends of a remote store's rollouts have been taken in, so that a saved state says exactly where to go on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from agl_slime.store.feed import FeedPage, FeedPosition


@dataclass(slots=True)
class _End:
    number: int
    rollout_id: str
    settled: bool = False


class FollowProgress:
    """The position in a store's feed, and what between the oldest unsettled end and that position is settled already.

    Ends are settled out of order, since conversions take different times; memory is bounded by how far they are apart.
    Not thread-safe.
    """

    def __init__(self) -> None:
        self.position = FeedPosition()
        self._ends: deque[_End] = deque()
        self._unsettled: dict[str, _End] = {}
        self._known: set[str] = set()  # settled before the state was saved; they come once more

    def take(self, page: FeedPage) -> list[str]:
        """Move the position to the end of ``page``; returns the rollouts to look at."""
        first = page["last"] - len(page["rollout_ids"]) + 1
        self.position.instance_id, self.position.after = page["instance_id"], page["last"]
        fresh: list[str] = []
        for number, rollout_id in enumerate(page["rollout_ids"], first):
            if rollout_id in self._known:
                self._known.discard(rollout_id)
                self._ends.append(_End(number, rollout_id, settled=True))
            else:
                end = self._unsettled[rollout_id] = _End(number, rollout_id)
                self._ends.append(end)
                fresh.append(rollout_id)
        self._trim()
        return fresh

    def settle(self, rollout_id: str) -> None:
        """The rollout is in a group, or counted as failed."""
        end = self._unsettled.pop(rollout_id, None)
        if end is not None:
            end.settled = True
            self._trim()

    def reset(self) -> None:
        """The store has begun another life: nothing of the old one comes any more."""
        self._ends.clear()
        self._unsettled.clear()
        self._known.clear()

    def state(self) -> dict[str, Any]:
        after = self._ends[0].number - 1 if self._ends else self.position.after
        return {
            "epoch": self.position.instance_id,
            "after": after,
            "settled": [end.rollout_id for end in self._ends if end.settled] + sorted(self._known),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.position = FeedPosition(state["epoch"], state["after"])
        self._ends.clear()
        self._unsettled.clear()
        self._known = set(state["settled"])

    def _trim(self) -> None:
        while self._ends and self._ends[0].settled:
            self._ends.popleft()
