"""Which rollouts have ended: one follower for every kind of store, and one table of what was read.

A ``BridgeStore`` tells of each end, a ``RemoteStore`` is followed from a position in its feed, any other store is
polled about the rollouts in flight and, where nobody announces them, looked through. What has been read is released in
the store, so that it need not be kept.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from agl_slime.datasource.read import FINISHED
from agl_slime.errors import DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import may_pass
from agl_slime.store.feed import FeedPage, FeedPosition
from agl_slime.support.backoff import Backoff

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A store that restarts is back within moments; one that is gone for this long, as long as its feed is followed, will
# not come back.
_PATIENCE_S = 120.0
_RELEASE_BATCH = 256
_TICK_S = 1.0
_POLL_OPEN_S = 5.0


@dataclass(slots=True)
class _End:
    number: int  # place in the store's feed; 0 where it has none
    read: bool = False
    saved: bool = False  # a state was saved after it was read
    released: bool = False


class EndTable:
    """The ends that were told of, until they have been read and released; thread-safe under its owner's lock.

    Ends are read out of order, since conversions take different times, so a saved state has the position before the
    oldest unread end, and the rollouts after it that were read. A store elsewhere outlives this process, and when a
    saved state is loaded, what ended after it is read again: with ``hold``, or once a state was saved, a rollout is
    released by the second save after it was read, so that the last two states can both be gone back to.
    """

    def __init__(self, *, hold: bool) -> None:
        self.position = FeedPosition()
        self.due: list[str] = []
        """To be released in the store."""
        self._hold = hold
        self._ends: dict[str, _End] = {}  # in the order of the feed
        self._known: set[str] = set()  # read before a restart; they come once more

    def told(self, page: FeedPage) -> list[str]:
        """Move the position to the end of ``page``; returns the rollouts to look at, each once however often the feed
        names it."""
        number = page["last"] - len(page["rollout_ids"])
        self.position.instance_id, self.position.after = page["instance_id"], page["last"]
        fresh = []
        for rollout_id in page["rollout_ids"]:
            number += 1
            known = rollout_id in self._known
            self._known.discard(rollout_id)
            if rollout_id not in self._ends:
                self._ends[rollout_id] = _End(number, read=known, released=known)
                if not known:
                    fresh.append(rollout_id)
            elif known:  # and not released yet
                self._ends[rollout_id].number = number
        self._trim()
        return fresh

    def read(self, rollout_id: str, *, ended: bool = True) -> None:
        """The rollout has been looked at. One that has not ended counts only where its end was told of: then there is
        nothing to read any more."""
        if not ended and rollout_id not in self._ends:
            return
        end = self._ends.setdefault(rollout_id, _End(0))
        if not end.read:
            end.read = True
            if not self._hold:
                self._release(rollout_id, end)
            self._trim()

    def saved(self, waiting: Collection[str]) -> None:
        """A state has been saved in which the rollouts ``waiting`` are still to be read again."""
        self._hold = True
        for rollout_id, end in self._ends.items():
            if end.read and not end.released and rollout_id not in waiting:
                if end.saved:
                    self._release(rollout_id, end)
                end.saved = True
        self._trim()

    def reset(self) -> None:
        """The store has begun anew: nothing that it told of is there any more."""
        self._ends.clear()
        self._known.clear()
        self.due.clear()

    def state(self) -> dict[str, Any]:
        """``ended``: what was read after the position; ``unreleased``: what is still kept in the store."""
        unread = [end.number for end in self._ends.values() if not end.read]
        after = unread[0] - 1 if unread else self.position.after
        ended = [name for name, end in self._ends.items() if end.read and end.number > after]
        kept = [name for name, end in self._ends.items() if end.read and not end.released]
        return {
            "follow": {"epoch": self.position.instance_id, "after": after},
            "ended": [*ended, *self._known],
            "unreleased": [*kept, *self.due],
        }

    def restore(self, state: dict[str, Any]) -> None:
        if (follow := state.get("follow")) is not None:
            self.position = FeedPosition(follow["epoch"], follow["after"])
            self._known = {*(state.get("ended") or ()), *follow.get("settled", ())}  # their name before this version
        self._ends = {name: _End(0, read=True) for name in state.get("unreleased") or []}

    def _release(self, rollout_id: str, end: _End) -> None:
        end.released = True
        self.due.append(rollout_id)

    def _trim(self) -> None:
        done = []
        for rollout_id, end in self._ends.items():
            if not (end.read and end.released):
                break
            done.append(rollout_id)
        for rollout_id in done:
            del self._ends[rollout_id]


class EndFollower:
    """A thread with an event loop that learns of ends and has each looked at. The first error of anything that runs
    there is the follower's ``failure``.

    Args:
        store: whose rollouts; ``None`` has no thread.
        look: reads a rollout that may have ended, on the loop.
        in_flight: the rollouts to poll a store about that tells of nothing; ``None`` when nobody announces any, so the
            store is to be looked through.
        restarted: called on the loop when a remote store has begun anew.
        tick: called on the loop now and then: time has passed.
        failed: called with the first error.
        table, lock: what was told and read; the lock guards the table.
    """

    def __init__(
        self,
        store: Any,
        *,
        look: Callable[[str], Awaitable[None]],
        in_flight: Callable[[], list[str] | None],
        restarted: Callable[[], None],
        tick: Callable[[], None],
        failed: Callable[[BaseException], None],
        table: EndTable,
        lock: threading.Condition,
        release: bool,
        poll_interval_s: float,
        tick_s: float,
    ) -> None:
        self.failure: BaseException | None = None
        self.polls = not hasattr(store, "subscribe_finished") and not hasattr(store, "follow_finished")
        """Whether the store tells of nothing, so that it would give again what was dealt with."""
        self._store = store
        self._look, self._in_flight, self._restarted = look, in_flight, restarted
        self._tick, self._failed = tick, failed
        self._table, self._lock = table, lock
        self._poll_interval_s, self._tick_s = poll_interval_s, min(tick_s, _TICK_S)
        self._release = getattr(store, "release", None) if release else None
        self._release_batch = 1 if isinstance(store, BridgeStore) else _RELEASE_BATCH
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready = threading.Event()
        self._begun = asyncio.Event()
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._main, name="agl-slime-datasource", daemon=True)
        if store is not None:
            self._thread.start()
            self._ready.wait()

    def begin(self) -> None:
        """Follow a remote store from the position that is known now, or look through a plain one: until then a saved
        state may be loaded."""
        self._on_loop(self._begun.set)

    def push(self, rollout_id: str) -> None:
        """A rollout may have ended: look at it. From any thread."""
        self._on_loop(self._start, self._look, rollout_id)

    def submit(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run ``work(*args)`` on the loop. From any thread."""
        self._on_loop(self._start, work, *args)

    def stop(self, timeout_s: float) -> None:
        self._on_loop(self._stop.set)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def fail(self, error: BaseException) -> None:
        """The follower cannot go on; what came first is what is told."""
        if self.failure is None:
            self.failure = error
            logger.debug("The data source failed.", exc_info=error)
            self._failed(error)

    def _on_loop(self, callback: Callable[..., Any], *args: Any) -> None:
        """Have the loop call this. Where it has ended, whoever waits is told elsewhere."""
        with suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback, *args)

    def _start(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        task = asyncio.ensure_future(work(*args))
        self._tasks.add(task)  # a task that only its loop knows may be collected while it runs
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # the thread has no caller; whoever waits for samples must hear of it
            self.fail(error)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        subscribe = getattr(self._store, "subscribe_finished", None)
        unsubscribe = subscribe(lambda rollout: self.push(rollout.rollout_id)) if subscribe is not None else None
        follow = getattr(self._store, "follow_finished", None)
        self._start(self._poll_open if subscribe else self._follow if follow else self._poll)
        self._start(self._ticks)
        endless = set(self._tasks)
        self._ready.set()
        try:
            await self._stop.wait()
        finally:
            if unsubscribe is not None:
                unsubscribe()
            for task in endless:
                task.cancel()
            if reading := self._tasks - endless:
                await asyncio.wait(reading, timeout=1.0)
            if follow is not None:
                await self._store.close()

    async def _poll_open(self) -> None:
        """A safety net under the subscription: rollouts in flight are asked about now and then, so that the store's
        watchdog runs and nothing that ended unseen is waited for."""
        while True:
            await asyncio.sleep(max(_POLL_OPEN_S, self._poll_interval_s))
            for rollout_id in self._in_flight() or ():
                self.push(rollout_id)

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            self._tick()
            await self._flush()

    async def _follow(self) -> None:
        """A remote store's feed, from the loaded position on; what comes twice is recognised by the ledger."""
        await self._begun.wait()
        position = self._table.position
        async for page in self._store.follow_finished(position):
            if position.instance_id not in ("", page["instance_id"]):
                self._restarted()
            with self._lock:
                fresh = self._table.told(page)
            if page["missed"]:
                logger.warning("The store's feed has gone on without this data source; the whole store is looked at.")
                fresh = await self._query_finished()
            for rollout_id in fresh:
                self._start(self._look, rollout_id)

    async def _poll(self) -> None:
        """Without a subscription: ask about the rollouts in flight, and look through the store for rollouts that nobody
        announced."""
        seen: set[str] = set()
        while True:
            began = time.monotonic()
            ids = self._in_flight()
            if ids is None and self._begun.is_set():
                # walks every rollout that the store holds: for small runs and tests
                ids = [rollout_id for rollout_id in await self._query_finished() if rollout_id not in seen]
                seen.update(ids)
            for rollout_id in ids or ():
                self._start(self._look, rollout_id)
            await asyncio.sleep(max(self._poll_interval_s, 9 * (time.monotonic() - began)))

    async def _query_finished(self) -> list[str]:
        for _ in range(10):
            try:
                found = await patiently(lambda: self._store.query_rollouts(status_in=sorted(FINISHED)))
                return [rollout.rollout_id for rollout in found]
            except RuntimeError as error:
                # a store that is not thread-safe may change while it is walked; look again
                if "changed size" not in str(error):
                    raise
        return []

    async def release(self) -> None:
        """Have the store release what is due, some at a time."""
        if len(self._table.due) >= self._release_batch:
            await self._flush()

    async def _flush(self) -> None:
        with self._lock:
            due = list(self._table.due)
            self._table.due.clear()
        if due and self._release is not None:
            try:
                await self._release(due)
            except Exception as error:  # the store keeps them: memory, not data, is at stake
                with self._lock:
                    self._table.due[:0] = due
                logger.warning("%d rollouts could not be released in the store: %s", len(due), error)


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """The result of a call to the store, made again while it is away. Raises ``DataSourceError`` with the first cause
    when it stays away."""
    return await Backoff("the store does not answer", DataSourceError, patience_s=_PATIENCE_S).run(call, may_pass)
