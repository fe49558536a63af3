"""Which rollouts have ended, as a list that others follow from a position on.

Delivery is at least once. A position is a number within one run of the server, which its *server instance id* names;
the last 100,000 ends are kept. A follower that comes from another instance, or from too far behind, is told so and
looks through the store once.
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
    """``rollout_ids`` ended at positions ``last - len + 1`` to ``last``. ``missed``: ends before the first of them are
    no longer known."""

    server_instance_id: str
    last: int
    rollout_ids: list[str]
    missed: bool


@dataclass(slots=True)
class FeedPosition:
    """Where a follower stands: the number of ends it has taken in, of a server instance."""

    server_instance_id: str = ""
    after: int = 0

    def restarted(self, page: FeedPage) -> bool:
        """Whether ``page`` comes from another server instance: what happened between the two is in neither's feed."""
        return self.server_instance_id not in ("", page["server_instance_id"])

    def move(self, page: FeedPage) -> None:
        """``page`` has been taken in."""
        self.server_instance_id, self.after = page["server_instance_id"], page["last"]


class FinishedFeed:
    """The ends of a store's rollouts, or those of one kind, numbered from 1 in the order in which they happened; one
    that is reported again keeps its number. Thread-safe."""

    def __init__(self, *, window: int = _WINDOW) -> None:
        self.server_instance_id = uuid.uuid4().hex
        self._ids: deque[str] = deque()
        self._among: set[str] = set()
        self._window = window
        self._last = 0
        self._lock = threading.Lock()
        self._waiters: set[Callable[[], None]] = set()
        self._closed = False

    def append(self, rollout: Rollout) -> None:
        """A rollout has ended."""
        with self._lock:
            if rollout.rollout_id in self._among:
                return
            if len(self._ids) == self._window:
                self._among.discard(self._ids.popleft())
            self._ids.append(rollout.rollout_id)
            self._among.add(rollout.rollout_id)
            self._last += 1
        self._notify()

    @property
    def last(self) -> int:
        """How many have ended since this feed began."""
        return self._last

    def position(self, after: int = 0) -> FeedPosition:
        """Where a follower of this feed stands that has taken in the first ``after`` ends."""
        return FeedPosition(self.server_instance_id, after)

    def read(self, position: FeedPosition) -> FeedPage:
        """What ended after ``position``, up to a page."""
        with self._lock:
            first = self._last - len(self._ids) + 1
            known = position.server_instance_id == self.server_instance_id and position.after <= self._last
            after = position.after if known else 0
            begin = max(after + 1, first)
            end = min(self._last, begin + _PAGE - 1)
            ids = [self._ids[i - first] for i in range(begin, end + 1)]
            return FeedPage(
                server_instance_id=self.server_instance_id, last=end, rollout_ids=ids, missed=begin > after + 1
            )

    async def wait(self, position: FeedPosition, timeout_s: float) -> FeedPage:
        """``read``, as soon as there is something to read; an empty page after ``timeout_s``."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def notify() -> None:
            with suppress(RuntimeError):  # the follower's loop is gone, and the follower with it
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
        """Let everyone who waits go."""
        self._closed = True
        self._notify()

    def _notify(self) -> None:
        with self._lock:
            waiters = list(self._waiters)
        for notify in waiters:
            notify()
