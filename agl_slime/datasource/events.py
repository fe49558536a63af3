"""How a data source learns which rollouts have ended: a thread with an event loop, and four ways for ids to come in.

A store that tells of ends is subscribed to, a remote one is followed, a plain one is looked through; and anybody may
push an id by hand.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from agl_slime.datasource.follow import FollowProgress
from agl_slime.groups.ledger import RolloutLedger
from agl_slime.support.agl import LightningStore

logger = logging.getLogger(__name__)


class FeedOwner(Protocol):
    """The data source, as its feed sees it. ``take``, ``look_at_groups`` and ``store_restarted`` run on the feed's
    loop; ``changed`` guards ``progress``."""

    ledger: RolloutLedger
    poll_interval_s: float
    progress: FollowProgress
    changed: threading.Condition
    announced: bool

    async def take(self, rollout_id: str) -> None:
        """Read and settle a rollout that may have ended."""
        ...

    async def look_at_groups(self) -> None:
        """Settle the groups that have waited long enough."""
        ...

    async def store_restarted(self) -> None:
        """The remote store has begun anew."""
        ...

    def fail(self, error: BaseException) -> None:
        """The feed cannot go on."""
        ...


class CompletionFeed:
    """The thread of a data source: where ids of finished rollouts come in, by subscription, by hand or by looking."""

    def __init__(self, *, owner: FeedOwner, store: Any, group_timeout_s: float | None = None) -> None:
        self._owner = owner
        self._store = store
        self._group_timeout_s = group_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queue: asyncio.Queue[str | None] | None = None
        self._ready = threading.Event()
        self._begun = asyncio.Event()
        self._submitted: set[asyncio.Future[None]] = set()
        # neither tells of ends nor lists them: the store is looked through
        self.looks = not hasattr(self._store, "subscribe_finished") and not hasattr(self._store, "follow_finished")
        self._thread = threading.Thread(target=self._main, name="agl-slime-datasource", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._ready.wait()

    def push(self, rollout_id: str | None) -> None:
        queue = self._queue
        if queue is not None:
            self._on_loop(queue.put_nowait, rollout_id)

    def begin(self) -> None:
        """Follow a remote store from the position that is known now, or look through a plain one."""
        self._on_loop(self._begun.set)

    def submit(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this on the thread's loop; if it fails, the data source has failed."""
        if not self._on_loop(self._start, work):
            work.close()

    def _on_loop(self, callback: Callable[..., Any], *args: Any) -> bool:
        """Have the thread's loop call this; ``False`` when it has ended, which whoever waits for samples is told
        elsewhere."""
        loop = self._loop
        if loop is None or loop.is_closed():
            return False
        try:
            loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # it closed between the check and the call
            return False
        return True

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(self._guarded(work))
        self._submitted.add(task)  # a task that only its loop knows may be collected while it runs
        task.add_done_callback(self._submitted.discard)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # nobody waits for it; whoever waits for samples must hear of it
            logger.debug("The data source could not enqueue rollouts.", exc_info=error)
            self._owner.fail(error)

    def stop(self, timeout_s: float) -> None:
        self.push(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # the thread has no caller; whoever waits for samples must hear of it
            logger.debug("The data source's thread ended.", exc_info=error)
            self._owner.fail(error)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue = asyncio.Queue()
        subscribe = getattr(self._store, "subscribe_finished", None)
        unsubscribe = subscribe(lambda rollout: self.push(rollout.rollout_id)) if subscribe is not None else None
        follow = getattr(self._store, "follow_finished", None)
        look: Coroutine[Any, Any, None] = (
            self._look_at_open()
            if subscribe is not None
            else self._follow(follow)
            if follow is not None
            else self._look_for_all()
        )
        lookers = [asyncio.create_task(look)]
        if self._group_timeout_s is not None:
            lookers.append(asyncio.create_task(self._look_at_groups(self._group_timeout_s)))
        for looker in lookers:
            looker.add_done_callback(self._looker_ended)
        takers: set[asyncio.Task[None]] = set()
        self._ready.set()
        try:
            while (rollout_id := await self._queue.get()) is not None:
                taker = asyncio.create_task(self._owner.take(rollout_id))
                takers.add(taker)
                taker.add_done_callback(takers.discard)
                taker.add_done_callback(self._taker_ended)
        finally:
            for looker in lookers:
                looker.cancel()
            if unsubscribe is not None:
                unsubscribe()
            if takers:
                await asyncio.wait(takers, timeout=1.0)
            if follow is not None:
                await self._store.close()

    def _taker_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._owner.fail(error)

    def _looker_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._owner.fail(error)

    async def _look_at_open(self) -> None:
        """A safety net under the subscription: rollouts in flight are asked about now and then, so that the store's
        watchdog runs and nothing that ended unseen is waited for."""
        while True:
            await asyncio.sleep(max(5.0, self._owner.poll_interval_s))
            for rollout_id in self._owner.ledger.open_ids():
                self.push(rollout_id)

    async def _look_at_groups(self, timeout_s: float) -> None:
        """Time is what settles a late group: it is looked at a little after its time."""
        while True:
            await asyncio.sleep(min(1.0, timeout_s / 10))
            await self._owner.look_at_groups()

    async def _follow(self, follow: Callable[[Any], Any]) -> None:
        """A remote store's feed, from the loaded position on; what comes twice is recognised by the ledger."""
        await self._begun.wait()
        progress = self._owner.progress
        async for page in follow(progress.position):
            if progress.position.instance_id and page["instance_id"] != progress.position.instance_id:
                await self._owner.store_restarted()
            with self._owner.changed:
                fresh = progress.take(page)
            if page["missed"]:
                logger.warning(
                    "This data source is too far behind the store's feed; looking through the whole store once."
                )
                fresh = [rollout.rollout_id for rollout in await _query_finished(self._store)]
            for rollout_id in fresh:
                self.push(rollout_id)

    async def _look_for_all(self) -> None:
        """Without a subscription: ask about the rollouts in flight, and look through the store for rollouts that nobody
        announced."""
        seen_finished: set[str] = set()
        while True:
            began = time.monotonic()
            open_ids = self._owner.ledger.open_ids()
            if open_ids or self._owner.announced:
                for rollout_id in open_ids:
                    self.push(rollout_id)
            elif (
                self._begun.is_set()
            ):  # until samples are asked for, a saved state may be loaded that says what was dealt with
                # Walks every rollout that the store holds: for small runs and tests. Loops announce what they enqueue.
                for rollout in await _query_finished(self._store):
                    if rollout.rollout_id not in seen_finished:
                        seen_finished.add(rollout.rollout_id)
                        self.push(rollout.rollout_id)
            cost = time.monotonic() - began
            await asyncio.sleep(max(self._owner.poll_interval_s, 9 * cost))


async def _query_finished(store: LightningStore) -> Sequence[Any]:
    for _ in range(10):
        try:
            return [*await store.query_rollouts(status_in=["succeeded", "failed", "cancelled"])]
        except RuntimeError as error:
            # a store that is not thread-safe may change while it is walked; look again
            if "changed size" not in str(error):
                raise
    return []
