"""``FinishedFeed``: the numbered list of ended rollouts, which readers follow from a position.

Delivery is at least once. A position is a number within one run of the server, identified by the *server instance id*.
The feed keeps the last 100,000 ends. The page for a reader from another instance, or from too far behind, says so, and
the reader then scans the store once.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from typing_extensions import TypedDict

from agl_slime.support.agl import Rollout

FEED_PATH = "/agl_slime/v1/finished"
CANCELLED_PATH = "/agl_slime/v1/cancelled"

_WINDOW = 100_000
_PAGE = 10_000
_LONGEST_WAIT_S = 60.0


class FeedPage(TypedDict):
    """``rollout_ids`` ended at positions ``last - len + 1`` to ``last``. ``missed``: earlier ends after the reader's
    position are no longer in the feed."""

    server_instance_id: str
    last: int
    rollout_ids: list[str]
    missed: bool


@dataclass(slots=True)
class FeedPosition:
    """A reader's position: the number of ends of a server instance that it has processed."""

    server_instance_id: str = ""
    last: int = 0

    def restarted(self, page: FeedPage) -> bool:
        """Whether ``page`` comes from another server instance; ends between the two are in neither feed."""
        return self.server_instance_id not in ("", page["server_instance_id"])

    def move(self, page: FeedPage) -> None:
        self.server_instance_id, self.last = page["server_instance_id"], page["last"]


class FinishedFeed:
    """The ends of a store's rollouts, or of one kind, numbered from 1; a repeated end keeps its number. Thread-safe."""

    def __init__(self, *, window: int = _WINDOW) -> None:
        self.server_instance_id = uuid.uuid4().hex
        self._ids: deque[str] = deque()
        self._id_set: set[str] = set()
        self._window = window
        self.last = 0
        """The number of ends so far."""
        self._lock = threading.Lock()
        self._waiters: set[Callable[[], None]] = set()
        self._closed = False

    def append(self, rollout: Rollout) -> None:
        with self._lock:
            if rollout.rollout_id in self._id_set:
                return
            if len(self._ids) == self._window:
                self._id_set.discard(self._ids.popleft())
            self._ids.append(rollout.rollout_id)
            self._id_set.add(rollout.rollout_id)
            self.last += 1
        self._notify()

    def read(self, position: FeedPosition) -> FeedPage:
        with self._lock:
            first = self.last - len(self._ids) + 1
            valid = position.server_instance_id == self.server_instance_id and position.last <= self.last
            processed = position.last if valid else 0
            begin = max(processed + 1, first)
            end = min(self.last, begin + _PAGE - 1)
            ids = [self._ids[i - first] for i in range(begin, end + 1)]
            missed = begin > processed + 1
            return FeedPage(server_instance_id=self.server_instance_id, last=end, rollout_ids=ids, missed=missed)

    async def wait(self, position: FeedPosition, timeout_s: float) -> FeedPage:
        """``read`` as soon as the page is not empty; an empty page after ``timeout_s``."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def notify() -> None:
            with suppress(RuntimeError):  # the reader's loop is closed
                loop.call_soon_threadsafe(ended.set)

        with self._lock:
            self._waiters.add(notify)
        try:
            page = self.read(position)
            if page["rollout_ids"] or page["server_instance_id"] != position.server_instance_id or self._closed:
                return page
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(ended.wait(), timeout=min(timeout_s, _LONGEST_WAIT_S))
            return self.read(position)
        finally:
            with self._lock:
                self._waiters.discard(notify)

    def close(self) -> None:
        """Release all waiting readers."""
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        with self._lock:
            waiters = list(self._waiters)
        for notify in waiters:
            notify()
