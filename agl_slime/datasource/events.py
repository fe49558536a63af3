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
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from agl_slime.errors import DataSourceError, spell_exception
from agl_slime.store.bridge import FINISHED, BridgeStore
from agl_slime.store.feed import FeedPage, FeedPosition
from agl_slime.support.backoff import Backoff
from agl_slime.support.http import may_pass

logger = logging.getLogger(__name__)

T = TypeVar("T")

# A store that restarts is back within moments; one that is away for this long, as long as its feed is followed, will
# not come back.
_PATIENCE_S = 120.0
_RELEASE_BATCH = 256
_TICK_S = 1.0
_POLL_OPEN_S = 5.0


@dataclass(slots=True)
class _End:
    number: int = 0  # place in the store's feed; 0: not named yet, -1: named before the position that was loaded
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

    def told(self, page: FeedPage, *, missed: Sequence[str] = ()) -> list[str]:
        """Move the position to the end of ``page``; returns the rollouts to look at, each once however often the feed
        names it. ``missed`` are those that may have ended before it, unseen."""
        self.position.server_instance_id, self.position.after = page["server_instance_id"], page["last"]
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


class EndFollower:
    """A thread with an event loop that learns of ends and has each looked at; a subclass says how. The first error of
    anything that runs there ends it. ``store=None`` has no thread.

    Of the subclass: ``_look`` reads a rollout that may have ended; ``_in_flight`` names those to poll a store about,
    ``None`` when nobody announces any; ``_store_restarted`` is called under the lock, ``_time_passed`` now and then.
    """

    _look: Callable[[str], Coroutine[Any, Any, None]]
    _in_flight: Callable[[], list[str] | None]
    _store_restarted: Callable[[], None]
    _time_passed: Callable[[], None]

    def __init__(self, store: Any, *, hold: bool, release: bool, poll_interval_s: float, tick_s: float) -> None:
        self._store = store
        self._changed = threading.Condition()
        """Guards everything but the ledger, which is safe by itself."""
        self._failure: BaseException | None = None
        self._tells = hasattr(store, "subscribe_finished")
        self._feeds = not self._tells and hasattr(store, "follow_finished")
        self._ends = EndTable(hold=hold and not self._tells)
        self._poll_interval_s, self._tick_s = poll_interval_s, min(tick_s, _TICK_S)
        self._release = getattr(store, "release", None) if release else None
        self._release_batch = 1 if isinstance(store, BridgeStore) else _RELEASE_BATCH
        self._to_read: set[str] = set()  # of a loaded state, or missed, until they are looked at
        self._away: Exception | None = None  # why the store does not answer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun, self._stop_asked = asyncio.Event(), asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running = threading.Event()
        self._thread = threading.Thread(target=self._main, name="agl-slime-datasource", daemon=True)

    def _fail(self, error: BaseException) -> None:
        """It cannot go on; what came first is what is told."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
        logger.debug("The data source failed.", exc_info=error)

    def _start(self) -> None:
        if self._store is not None:
            self._thread.start()
            self._running.wait()

    def _begin(self) -> None:
        """Follow a remote store from the position that is known now, or look through a plain one: until then a saved
        state may be loaded."""
        self._on_loop(self._begun.set)

    def _submit(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Run ``work(*args)`` on the loop. From any thread."""
        self._on_loop(self._spawn, work, *args)

    def _join(self, timeout_s: float) -> None:
        self._on_loop(self._stop_asked.set)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
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

    def _on_loop(self, callback: Callable[..., Any], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended, which whoever waits is told elsewhere
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback, *args)

    def _spawn(self, work: Callable[..., Awaitable[None]], *args: Any) -> None:
        task = asyncio.ensure_future(work(*args))
        self._tasks.add(task)  # a task that only its loop knows may be collected while it runs
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # the thread has no caller; whoever waits for samples must hear of it
            self._fail(error)
        finally:
            self._running.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        unsubscribe = None
        if self._tells:
            unsubscribe = self._store.subscribe_finished(lambda rollout: self._submit(self._look, rollout.rollout_id))
        self._spawn(self._follow if self._feeds else self._poll)
        self._spawn(self._tick)
        endless = set(self._tasks)
        self._running.set()
        await self._stop_asked.wait()
        if unsubscribe is not None:
            unsubscribe()
        for task in endless:
            task.cancel()
        if reading := self._tasks - endless:
            await asyncio.wait(reading, timeout=1.0)
        if self._feeds:
            await self._store.close()

    async def _follow(self) -> None:
        """A remote store's feed, from the loaded position on; what comes twice is recognised by the ledger."""
        await self._begun.wait()
        position = self._ends.position
        async for page in self._store.follow_finished(position):
            missed = []
            if page["missed"]:
                logger.warning("The store's feed has gone on without this data source; the whole store is looked at.")
                missed = await self._finished_ids()
            with self._changed:
                if position.server_instance_id not in ("", page["server_instance_id"]):
                    self._ends.reset()
                    self._store_restarted()
                fresh = self._ends.told(page, missed=missed)
                self._to_read.update(missed)
            for rollout_id in fresh:
                self._spawn(self._look, rollout_id)

    async def _poll(self) -> None:
        """Ask about the rollouts in flight, and look through a store that tells of nothing for rollouts that nobody
        announced. Under a subscription it is a safety net: the store's watchdog runs, and nothing that ended unseen is
        waited for."""
        pause_s = max(_POLL_OPEN_S, self._poll_interval_s) if self._tells else self._poll_interval_s
        seen: set[str] = set()
        cost_s = 0.0
        while True:
            await asyncio.sleep(max(pause_s, 9 * cost_s))
            began = time.monotonic()
            ids = self._in_flight()
            if ids is None and not self._tells and self._begun.is_set():
                # walks every rollout that the store holds: for small runs and tests
                ids = [rollout_id for rollout_id in await self._finished_ids() if rollout_id not in seen]
                seen.update(ids)
            for rollout_id in ids or ():
                self._spawn(self._look, rollout_id)
            cost_s = time.monotonic() - began

    async def _finished_ids(self) -> list[str]:
        found = await self._patiently(lambda: self._store.query_rollouts(status_in=sorted(FINISHED)))
        return [rollout.rollout_id for rollout in found]

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            self._time_passed()
            await self._release_due(at_least=1)

    async def _release_due(self, *, at_least: int | None = None) -> None:
        """Have the store release what was read, some at a time."""
        with self._changed:
            due = self._ends.due if len(self._ends.due) >= (at_least or self._release_batch) else []
            if due:
                self._ends.due = []
        if due and self._release is not None:
            try:
                await self._release(due)
            except Exception as error:  # the store keeps them: memory, not data, is at stake
                with self._changed:
                    self._ends.due[:0] = due
                logger.warning("%d rollouts could not be released in the store: %s", len(due), error)
