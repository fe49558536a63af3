"""Completed rollouts: a follower for every kind of store, and a table of the rollouts that were read.

A ``BridgeStore`` notifies at each completion, a ``RemoteStore`` is followed from a position in its feed, and any other
store is polled about the rollouts in flight or, where none was announced, scanned. Rollouts that were read are released
in the store, which may then forget them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from agl_slime.errors import DataSourceError
from agl_slime.store.bridge import FINISHED, BridgeStore
from agl_slime.store.client import follow_feed
from agl_slime.store.feed import FeedPage, FeedPosition
from agl_slime.support.backoff import Backoff
from agl_slime.support.http import is_transient
from agl_slime.support.threads import LoopThread, run_blocking, run_in_thread
from agl_slime.tokens.replay import remove_replay

if TYPE_CHECKING:
    from agl_slime.data.ingestor import RolloutIngestor

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A store that restarts is back within moments; one that is away for this long will not come back.
_PATIENCE_S = 120.0
_RELEASE_BATCH = 256
_TICK_S = 1.0
_POLL_OPEN_S = 5.0
_LOOKUPS_AT_ONCE = 64


@dataclass(slots=True)
class _Completion:
    number: int = 0  # position in the feed; 0 = not listed yet, -1 = listed before the restored position
    read: bool = False
    saved: bool = False  # a state was saved after it was read
    released: bool = False


class CompletionTable:
    """Completed rollouts that the store listed, until they have been read and released. Not thread-safe.

    Conversions take different times, so rollouts are read out of order: a saved state has the feed position before the
    oldest unread rollout, and the rollouts after it that were read. A remote store outlives this process, and a
    restored state reads again every rollout that ended after it. With ``hold``, or once a state was saved, a rollout is
    therefore released by the second save after it was read: either of the last two states can be restored.
    """

    def __init__(self, *, hold: bool, has_feed: bool) -> None:
        self.position = FeedPosition()
        self.due: list[str] = []
        """Rollouts to release in the store."""
        self._hold, self._has_feed = hold, has_feed
        self._ends: dict[str, _Completion] = {}  # in the order of the feed
        # read before the feed listed them, or before a restart: the feed lists them again
        self._already_read: set[str] = set()

    def add_page(self, page: FeedPage, *, missed: Collection[str] = ()) -> list[str]:
        """Move the position to the end of ``page``; returns the rollouts to read, each once however often the feed
        lists it. ``missed`` are rollouts that may have ended unseen before the page."""
        self.position.move(page)
        fresh = []
        for number, rollout_id in enumerate(page["rollout_ids"], page["last"] - len(page["rollout_ids"]) + 1):
            was_read = rollout_id in self._already_read
            self._already_read.discard(rollout_id)
            if rollout_id not in self._ends:
                self._ends[rollout_id] = _Completion(number, read=was_read, released=was_read)
                fresh += [] if was_read else [rollout_id]
            elif was_read or not self._ends[rollout_id].number:  # not released yet, or read before the feed listed it
                self._ends[rollout_id] = replace(self._ends.pop(rollout_id), number=number)
        for rollout_id in missed:  # listed before; unread ones wait in ``pending_reads``
            self._ends.setdefault(rollout_id, _Completion(-1, read=True))
        self._trim()
        return [*dict.fromkeys([*fresh, *missed])]

    def read(self, rollout_id: str, *, ended: bool = True) -> None:
        """Note that the rollout was read. One without an end counts only if the store listed it: then it is gone."""
        if ended or rollout_id in self._ends:
            self._ends.setdefault(rollout_id, _Completion()).read = True
            self._release(() if self._hold else (rollout_id,))

    def saved(self, waiting: Collection[str]) -> None:
        """Note that a state was saved in which the rollouts ``waiting`` are still to be read."""
        self._hold = True
        covered = {name: end for name, end in self._ends.items() if end.read and name not in waiting}
        self._release([name for name, end in covered.items() if end.saved])
        for end in covered.values():
            end.saved = True

    def reset(self) -> None:
        """Forget everything: the store was restarted and has none of these rollouts any more."""
        for rollouts in (self._ends, self._already_read, self.due):
            rollouts.clear()

    def state(self) -> dict[str, Any]:
        """``ended``: rollouts read after the position; ``unreleased``: rollouts that the store still keeps."""
        position = next((end.number - 1 for end in self._ends.values() if not end.read), self.position.last)
        later = (name for name, end in self._ends.items() if end.read and self._comes_after(position, end))
        unreleased = [name for name, end in self._ends.items() if end.read and not end.released]
        return {
            "follow": {"server_instance_id": self.position.server_instance_id, "after": position},
            "ended": [*{*later, *self._already_read}],
            "unreleased": [*unreleased, *self.due],
        }

    def restore(self, state: dict[str, Any]) -> None:
        if (follow := state.get("follow")) is not None:
            self.position = FeedPosition(follow["server_instance_id"], follow["after"])
            self._already_read = set(state.get("ended") or ())
        self._ends = {name: _Completion(-1, read=True) for name in state.get("unreleased") or ()}

    def _release(self, rollout_ids: Collection[str]) -> None:
        for rollout_id in rollout_ids:
            if not self._ends[rollout_id].released:
                self._ends[rollout_id].released = True
                self.due.append(rollout_id)
        self._trim()

    def _comes_after(self, position: int, end: _Completion) -> bool:
        """Whether the feed lists it after ``position``; a store without a feed lists nothing."""
        return end.number > position or (self._has_feed and not end.number)

    def _trim(self) -> None:
        while self._ends and (end := self._ends[first := next(iter(self._ends))]).read and end.released:
            del self._ends[first]
            if self._comes_after(self.position.last, end):
                self._already_read.add(first)  # perhaps trained on already, and the feed has yet to list it


class CompletionFollower:
    """A thread with an event loop that follows the store and passes each completed rollout to its ``listener``, which
    it calls on that loop. The first error there ends it. ``store=None`` has no thread. ``changed`` guards the table."""

    def __init__(
        self,
        store: Any,
        listener: RolloutIngestor,
        *,
        changed: threading.Condition,
        hold: bool,
        release: bool,
        replay_files: Path | None,
        poll_interval_s: float,
        tick_s: float,
    ) -> None:
        self._store, self._listener, self._changed = store, listener, changed
        self.notifies = hasattr(store, "subscribe_finished")
        """Whether the store calls back at each completion; ``has_feed``: whether it lists completions in a feed."""
        self.has_feed = not self.notifies and hasattr(store, "follow_finished")
        self.table = CompletionTable(hold=hold and not self.notifies, has_feed=self.has_feed)
        self.pending_reads: set[str] = set()
        """Rollouts of a restored state, or missed ones, until they are read."""
        self._poll_interval_s, self._tick_s = poll_interval_s, min(tick_s, _TICK_S)
        self._release = getattr(store, "release", None) if release else None
        self._replay_files = replay_files
        self._released_by_reader = None if release else getattr(store, "released", None)
        self._release_batch = 1 if isinstance(store, BridgeStore) else _RELEASE_BATCH
        # one for all calls, so that its error names the first failure since the store last answered
        self._backoff = Backoff("the store does not answer", DataSourceError, patience_s=_PATIENCE_S)
        self._begun, self._stop_asked = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.thread = LoopThread(self._serve, name="agl-slime-datasource")
        self._starting, self._started = threading.Lock(), False
        self._unsubscribe: Callable[[], object] | None = None
        if self.notifies:
            self._unsubscribe = store.subscribe_finished(
                lambda rollout: self.submit(listener.read_if_finished, rollout.rollout_id)
            )

    def start(self) -> None:
        """Start the thread, as the first completion and every call that needs it do. Has no effect after ``stop``."""
        with self._starting:
            if self._store is not None and not self._started:
                self._started = True
                self.thread.start()

    def begin(self) -> None:
        """Begin to follow a remote store from its position, or to scan a plain one. States are restored before."""
        self.start()
        self.thread.call(self._begun.set)

    def submit(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run ``work(*args)`` on the loop. From any thread."""
        self.start()
        self.thread.call(self._spawn, work, *args)

    def run(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """A future of a coroutine of another loop that runs on this one. Raises ``RuntimeError`` when it has ended."""
        self.start()
        assert self.thread.loop is not None
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.thread.loop))

    def stop(self, timeout_s: float) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
        with self._starting:
            started, self._started = self._started, True
        if not started and self.has_feed:
            run_blocking(self._store.close())
        self.thread.call(self._stop_asked.set)
        self.thread.join(timeout_s)

    async def with_retries(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a call to the store, which is retried while the store is unreachable. Raises
        ``DataSourceError`` with the first cause, whichever call met it, when the store stays unreachable."""
        return await self._backoff.run(call, is_transient)

    async def release_due(self, *, at_least: int | None = None) -> None:
        """Release rollouts that were read in the store, in batches."""
        with self._changed:
            due = self.table.due if len(self.table.due) >= (at_least or self._release_batch) else []
            if due:
                self.table.due = []
        # files first: a kill before the store's release leaves no orphan file
        if due and self._replay_files is not None:
            await run_in_thread(partial(remove_replay, self._replay_files, self._read_by_every_reader(due)))
        if due and self._release is not None:
            try:
                await self._release(due)
            except Exception as error:  # the store keeps them: memory, not data, is at stake
                with self._changed:
                    self.table.due[:0] = due
                logger.warning("%d rollouts could not be released in the store: %s", len(due), error)

    def _read_by_every_reader(self, read: list[str]) -> list[str]:
        """The ids whose replay files may be deleted: already released by the reader that releases in the store."""
        if self._released_by_reader is None:
            return read if self._release is not None else []
        released = self._released_by_reader(read)
        with self._changed:
            self.table.due[:0] = [rollout_id for rollout_id in read if rollout_id not in released]
        return [rollout_id for rollout_id in read if rollout_id in released]

    def _spawn(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        task = asyncio.ensure_future(work(*args))
        self._tasks.add(task)  # a task that only its loop knows may be collected while it runs
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._listener.failed(error)

    async def _serve(self, ready: Callable[[], None]) -> None:
        try:
            self._spawn(self._follow if self.has_feed else self._poll)
            self._spawn(self._tick)
            endless = set(self._tasks)
            ready()
            await self._stop_asked.wait()
            for task in endless:
                task.cancel()
            if reading := self._tasks - endless:
                await asyncio.wait(reading, timeout=1.0)
            if self.has_feed:
                await self._store.close()
        except BaseException as error:  # the thread has no caller: the listener passes it to every waiting one
            self._listener.failed(error)

    async def _follow(self) -> None:
        """Follow a remote store's feed from the restored position; the ledger recognises a rollout that comes twice."""
        await self._begun.wait()
        await self._listener.producer.before_following()
        await follow_feed(self._store, self.table.position, self.process_page, self._catch_up, patience_s=_PATIENCE_S)

    async def _catch_up(self, page: FeedPage) -> Sequence[str]:
        if not page["missed"]:
            return ()
        logger.warning(
            "The store's feed no longer reaches back to this data source's position; the whole store is scanned."
        )
        return await self._finished_ids()

    def process_page(self, page: FeedPage, missed: Collection[str] = ()) -> None:
        """Process a page of the feed; ``missed`` may have ended unseen before it."""
        with self._changed:
            if self.table.position.restarted(page):
                self.table.reset()
                self._listener.store_restarted()
            fresh = self.table.add_page(page, missed=missed)
            self.pending_reads.update(missed)
        for rollout_id in fresh:
            self.submit(self._listener.read_if_finished, rollout_id)

    async def _poll(self) -> None:
        """Poll the rollouts in flight, or scan a plain store where no rollout was announced. Beside a subscription this
        is a safety net: it drives the store's watchdog and finds rollouts that ended unseen."""
        pause_s = max(_POLL_OPEN_S, self._poll_interval_s) if self.notifies else self._poll_interval_s
        listed: set[str] = set()
        cost_s = 0.0
        while True:
            await asyncio.sleep(max(pause_s, 9 * cost_s))
            began = time.monotonic()
            ids = self._listener.in_flight()
            if ids is not None:
                ended = await self._ended_among(ids)
            elif not self.notifies and self._begun.is_set():
                # walks every rollout that the store holds: for small runs and tests
                ended = [rollout_id for rollout_id in await self._finished_ids() if rollout_id not in listed]
                listed.update(ended)
            else:
                ended = []
            for rollout_id in ended:
                self._spawn(self._listener.read_if_finished, rollout_id)
            cost_s = time.monotonic() - began

    async def _ended_among(self, rollout_ids: Sequence[str]) -> list[str]:
        ended: list[str] = []
        for first in range(0, len(rollout_ids), _LOOKUPS_AT_ONCE):
            few = rollout_ids[first : first + _LOOKUPS_AT_ONCE]
            calls = (partial(self._store.get_rollout_by_id, rollout_id) for rollout_id in few)
            rollouts = await asyncio.gather(*map(self.with_retries, calls))
            ended += [rollout.rollout_id for rollout in rollouts if rollout is not None and rollout.status in FINISHED]
        return ended

    async def _finished_ids(self) -> list[str]:
        rollouts = await self.with_retries(lambda: self._store.query_rollouts(status_in=sorted(FINISHED)))
        return [rollout.rollout_id for rollout in rollouts]

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            self._listener.time_passed()
            await self.release_due(at_least=1)
