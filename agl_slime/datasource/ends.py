"""Which rollouts have ended: a follower for every kind of store, and the table of what was read.

A ``BridgeStore`` tells of each end, a ``RemoteStore`` is followed from a position in its feed, any other store is
polled about the rollouts in flight and, where nobody announces them, looked through. What has been read is released in
the store, so that it need not be kept.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from agl_slime.errors import DataSourceError, spell_exception
from agl_slime.store.bridge import FINISHED, BridgeStore
from agl_slime.store.feed import FeedPage, FeedPosition
from agl_slime.store.follow import follow_feed
from agl_slime.support.backoff import Backoff
from agl_slime.support.http import may_pass
from agl_slime.support.threads import LoopThread, run_in_thread
from agl_slime.trace.replay_files import remove_replay

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A store that restarts is back within moments; one that is away for this long, as long as its feed is followed, will
# not come back.
_PATIENCE_S = 120.0
_RELEASE_BATCH = 256
_TICK_S = 1.0
_POLL_OPEN_S = 5.0
_LOOKUPS_AT_ONCE = 64


@dataclass(slots=True)
class _End:
    number: int = 0  # position in the feed; 0 = not listed yet, -1 = listed before the restored position
    read: bool = False
    saved: bool = False  # a state was saved after it was read
    released: bool = False


class EndTable:
    """The ends that were told of, until they have been read and released. Not thread-safe.

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
        self._known: set[str] = set()  # read before the feed named them, or before a restart; they come once more

    def told(self, page: FeedPage, *, missed: Collection[str] = ()) -> list[str]:
        """Move the position to the end of ``page``; returns the rollouts to look at, each once however often the feed
        names it. ``missed`` are those that may have ended before it, unseen."""
        self.position.move(page)
        fresh = []
        for number, rollout_id in enumerate(page["rollout_ids"], page["last"] - len(page["rollout_ids"]) + 1):
            known = rollout_id in self._known
            self._known.discard(rollout_id)
            if rollout_id not in self._ends:
                self._ends[rollout_id] = _End(number, read=known, released=known)
                fresh += [] if known else [rollout_id]
            elif known or not self._ends[rollout_id].number:  # not released yet, or read before it was told of
                self._ends[rollout_id] = replace(self._ends.pop(rollout_id), number=number)
        for rollout_id in missed:
            self._ends.setdefault(rollout_id, _End(-1, read=True))  # named before; until they are read, they wait
        self._trim()
        return [*dict.fromkeys([*fresh, *missed])]

    def read(self, rollout_id: str, *, ended: bool = True) -> None:
        """The rollout has been looked at. One that has not ended counts only where its end was told of: then there is
        nothing to read any more."""
        if ended or rollout_id in self._ends:
            self._ends.setdefault(rollout_id, _End()).read = True
            self._release(() if self._hold else (rollout_id,))

    def saved(self, waiting: Collection[str]) -> None:
        """A state has been saved in which the rollouts ``waiting`` are still to be read again."""
        self._hold = True
        held = {name: end for name, end in self._ends.items() if end.read and name not in waiting}
        self._release([name for name, end in held.items() if end.saved])
        for end in held.values():
            end.saved = True

    def reset(self) -> None:
        """The store has begun anew: nothing that it told of is there any more."""
        for told in (self._ends, self._known, self.due):
            told.clear()

    def state(self) -> dict[str, Any]:
        """``ended``: what was read after the position; ``unreleased``: what is still kept in the store."""
        after = next((end.number - 1 for end in self._ends.values() if not end.read), self.position.after)
        later = (name for name, end in self._ends.items() if end.read and self._comes_after(after, end))
        kept = [name for name, end in self._ends.items() if end.read and not end.released]
        return {
            "follow": {"server_instance_id": self.position.server_instance_id, "after": after},
            "ended": [*{*later, *self._known}],
            "unreleased": [*kept, *self.due],
        }

    def restore(self, state: dict[str, Any]) -> None:
        if (follow := state.get("follow")) is not None:
            self.position = FeedPosition(follow["server_instance_id"], follow["after"])
            self._known = set(state.get("ended") or ())
        self._ends = {name: _End(-1, read=True) for name in state.get("unreleased") or ()}

    def _release(self, rollout_ids: Collection[str]) -> None:
        for rollout_id in rollout_ids:
            if not self._ends[rollout_id].released:
                self._ends[rollout_id].released = True
                self.due.append(rollout_id)
        self._trim()

    def _comes_after(self, position: int, end: _End) -> bool:
        """Whether the feed names it after ``position``; a store without a feed names nothing."""
        return end.number > position or (bool(self.position.server_instance_id) and not end.number)

    def _trim(self) -> None:
        while self._ends and (end := self._ends[first := next(iter(self._ends))]).read and end.released:
            del self._ends[first]
            if self._comes_after(self.position.after, end):
                self._known.add(first)  # it may have been trained on, and is told of yet


class Intake(Protocol):
    """Who is told of ends; its methods are called on the follower's loop."""

    async def look(self, rollout_id: str) -> None: ...

    def in_flight(self) -> list[str] | None: ...

    async def before_following(self) -> None: ...

    def store_restarted(self) -> None: ...

    def time_passed(self) -> None: ...

    def failed(self, error: BaseException) -> None: ...


class EndFollower:
    """A thread with an event loop that learns of ends and has its ``intake`` look at each. The first error of anything
    that runs there ends it. ``store=None`` has no thread. ``changed`` guards the table."""

    def __init__(
        self,
        store: Any,
        intake: Intake,
        *,
        changed: threading.Condition,
        hold: bool,
        release: bool,
        replay_files: Path | None,
        poll_interval_s: float,
        tick_s: float,
    ) -> None:
        self._store, self._intake, self._changed = store, intake, changed
        self.tells = hasattr(store, "subscribe_finished")
        """Whether the store calls for each end; ``feeds``: whether it has a feed of them."""
        self.feeds = not self.tells and hasattr(store, "follow_finished")
        self.table = EndTable(hold=hold and not self.tells)
        self.to_read: set[str] = set()
        """Of a restored state, or missed, until they are looked at."""
        self._poll_interval_s, self._tick_s = poll_interval_s, min(tick_s, _TICK_S)
        self._release = getattr(store, "release", None) if release else None
        self._replay_files, self._kept_by = replay_files, None if release else getattr(store, "released", None)
        self._release_batch = 1 if isinstance(store, BridgeStore) else _RELEASE_BATCH
        self._away: Exception | None = None  # why the store does not answer
        self._begun, self._stop_asked = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.thread = LoopThread(self._serve, name="agl-slime-datasource")

    def start(self) -> None:
        if self._store is not None:
            self.thread.start()

    def begin(self) -> None:
        """Follow a remote store from the position that is known now, or look through a plain one: until then a saved
        state may be restored."""
        self.thread.call(self._begun.set)

    def submit(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run ``work(*args)`` on the loop. From any thread."""
        self.thread.call(self._spawn, work, *args)

    def stop(self, timeout_s: float) -> None:
        self.thread.call(self._stop_asked.set)
        self.thread.join(timeout_s)

    async def patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a call to the store, made again while it is away. Raises ``DataSourceError`` when it stays
        away, with the first cause, whichever call met it."""
        backoff = Backoff("", patience_s=_PATIENCE_S)
        while True:
            try:
                result = await call()
            except Exception as error:
                if not may_pass(error):
                    raise
                self._away = self._away or error
                if (pause_s := backoff.failed(error)) is None:
                    said = spell_exception(self._away)
                    raise DataSourceError(f"the store has not answered for {_PATIENCE_S:g} s: {said}") from self._away
                await asyncio.sleep(pause_s)
            else:
                self._away = None
                return result

    async def release_due(self, *, at_least: int | None = None) -> None:
        """Have the store release what was read, some at a time."""
        with self._changed:
            due = self.table.due if len(self.table.due) >= (at_least or self._release_batch) else []
            if due:
                self.table.due = []
        # before the store is told: a kill between the two leaves nothing behind
        if due and self._replay_files is not None:
            await run_in_thread(partial(remove_replay, self._replay_files, self._read_by_all(due)))
        if due and self._release is not None:
            try:
                await self._release(due)
            except Exception as error:  # the store keeps them: memory, not data, is at stake
                with self._changed:
                    self.table.due[:0] = due
                logger.warning("%d rollouts could not be released in the store: %s", len(due), error)

    def _read_by_all(self, read: list[str]) -> list[str]:
        """Of these those that nobody else reads: who does not release waits for the reader that does."""
        if self._kept_by is None:
            return read if self._release is not None else []
        released = self._kept_by(read)
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
            self._intake.failed(error)

    async def _serve(self, ready: Callable[[], None]) -> None:
        try:
            await self._run(ready)
        except BaseException as error:  # the thread has no caller; whoever waits for samples must hear of it
            self._intake.failed(error)

    async def _run(self, ready: Callable[[], None]) -> None:
        look, unsubscribe = self._intake.look, None
        if self.tells:
            unsubscribe = self._store.subscribe_finished(lambda rollout: self.submit(look, rollout.rollout_id))
        self._spawn(self._follow if self.feeds else self._poll)
        self._spawn(self._tick)
        endless = set(self._tasks)
        ready()
        await self._stop_asked.wait()
        if unsubscribe is not None:
            unsubscribe()
        for task in endless:
            task.cancel()
        if reading := self._tasks - endless:
            await asyncio.wait(reading, timeout=1.0)
        if self.feeds:
            await self._store.close()

    async def _follow(self) -> None:
        """A remote store's feed, from the restored position on; what comes twice is recognised by the ledger."""
        await self._begun.wait()
        await self._intake.before_following()
        await follow_feed(self._store, self.table.position, self.take, self._catch_up, patience_s=_PATIENCE_S)

    async def _catch_up(self, page: FeedPage) -> Sequence[str]:
        if not page["missed"]:
            return ()
        logger.warning("The store's feed has gone on without this data source; the whole store is looked at.")
        return await self._finished_ids()

    def take(self, page: FeedPage, missed: Collection[str] = ()) -> None:
        """A page of the feed, and what may have ended unseen before it."""
        with self._changed:
            if self.table.position.restarted(page):
                self.table.reset()
                self._intake.store_restarted()
            fresh = self.table.told(page, missed=missed)
            self.to_read.update(missed)
        for rollout_id in fresh:
            self.submit(self._intake.look, rollout_id)

    async def _poll(self) -> None:
        """Ask about the rollouts in flight, and look through a store that tells of nothing for rollouts that nobody
        announced. Under a subscription it is a safety net: the store's watchdog runs, and nothing that ended unseen is
        waited for."""
        pause_s = max(_POLL_OPEN_S, self._poll_interval_s) if self.tells else self._poll_interval_s
        seen: set[str] = set()
        cost_s = 0.0
        while True:
            await asyncio.sleep(max(pause_s, 9 * cost_s))
            began = time.monotonic()
            ids = self._intake.in_flight()
            if ids is not None:
                ended = await self._ended_among(ids)
            elif not self.tells and self._begun.is_set():
                # walks every rollout that the store holds: for small runs and tests
                ended = [rollout_id for rollout_id in await self._finished_ids() if rollout_id not in seen]
                seen.update(ended)
            else:
                ended = []
            for rollout_id in ended:
                self._spawn(self._intake.look, rollout_id)
            cost_s = time.monotonic() - began

    async def _ended_among(self, rollout_ids: Sequence[str]) -> list[str]:
        ended: list[str] = []
        for first in range(0, len(rollout_ids), _LOOKUPS_AT_ONCE):
            few = rollout_ids[first : first + _LOOKUPS_AT_ONCE]
            found = await asyncio.gather(*(self.patiently(partial(self._store.get_rollout_by_id, one)) for one in few))
            ended += [rollout.rollout_id for rollout in found if rollout is not None and rollout.status in FINISHED]
        return ended

    async def _finished_ids(self) -> list[str]:
        found = await self.patiently(lambda: self._store.query_rollouts(status_in=sorted(FINISHED)))
        return [rollout.rollout_id for rollout in found]

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            self._intake.time_passed()
            await self.release_due(at_least=1)
