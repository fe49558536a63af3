"""When which running rollout must be looked at by the store's watchdog.

Stock code looks at every running rollout on every scan: with 4,096 in flight a scan takes 0.2 s, once per
``scan_debounce_seconds``. Here a scan takes only those whose time limit, or whose limit of silence, may have passed.
"""

from __future__ import annotations

import heapq

# Entries of rollouts that have ended stay in the heap until their time comes or the heap is rebuilt, which is when this
# many may be stale.
_STALE = 1_024


class WatchList:
    """Rollout ids by the time of their next check, in seconds since the epoch. Not thread-safe."""

    def __init__(self) -> None:
        self._next: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._next)

    def set(self, rollout_id: str, when: float) -> None:
        """Check this rollout at ``when``, and not at the time that was set before."""
        self._next[rollout_id] = when
        heapq.heappush(self._heap, (when, rollout_id))
        if len(self._heap) > 2 * len(self._next) + _STALE:
            self._heap = [(at, name) for name, at in self._next.items()]
            heapq.heapify(self._heap)

    def discard(self, rollout_id: str) -> None:
        """This rollout does not run any more."""
        self._next.pop(rollout_id, None)

    def take_due(self, now: float) -> list[str]:
        """The rollouts whose check is due; they are no longer on the list."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            when, rollout_id = heapq.heappop(self._heap)
            if self._next.get(rollout_id) == when:
                del self._next[rollout_id]
                due.append(rollout_id)
        return due
