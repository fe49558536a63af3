"""When rollouts are admitted. The serial schedule: an iteration's groups are enqueued together, and nothing is trained
on before each of them has been finalized."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from agl_slime.datasource.source import GroupSource
from agl_slime.groups.results import GroupResult
from agl_slime.loop.settings import LoopSettings
from agl_slime.loop.tasks import TaskCursor, TaskGroup, enqueue_requests
from agl_slime.support.agl import LightningStore

logger = logging.getLogger(__name__)

# Between looks at whether runner, data source and engine live.
_LOOK_INTERVAL_S = 1.0
# When a run ends, a store that does not answer is left alone after this long: Ctrl-C must not wait for it.
_CANCEL_TIMEOUT_S = 1.0


class SerialSchedule:
    """Enqueues groups and waits for them. ``raise_if_dead`` is called about once a second while something is waited
    for, ``wake`` after rollouts were enqueued."""

    def __init__(
        self,
        store: LightningStore,
        data_source: GroupSource,
        settings: LoopSettings,
        raise_if_dead: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        self._store, self._data_source, self._settings = store, data_source, settings
        self._raise_if_dead, self._wake = raise_if_dead, wake
        self._finalized: asyncio.Queue[GroupResult] = asyncio.Queue()
        self._waiting: dict[str, TaskCursor] = {}  # groups that have not been finalized
        self._last_look = float("-inf")
        self.resources_id: str | None = None  # that rollouts are enqueued with
        self.metadata: dict[str, Any] = {}  # of each rollout

    def finalized(self, group: GroupResult) -> None:
        """The data source has finalized a group."""
        self._finalized.put_nowait(group)

    async def collect(self, tasks: TaskCursor) -> list[GroupResult]:
        """Enqueue an iteration's groups and wait until each is finalized; those that are dropped are replaced, as often
        as the settings say."""
        settings = self._settings
        budget = settings.rollout_batch_size if settings.max_replaced_groups is None else settings.max_replaced_groups
        enqueue = partial(self._enqueue, tasks, size=settings.n_samples_per_prompt, mode="train")
        waiting = await enqueue(settings.rollout_batch_size)
        groups: list[GroupResult] = []
        dropped = replaced = 0
        something_works = False
        while waiting:
            group = await self._next()
            waiting -= 1
            groups.append(group)
            dropped += not group.ready
            something_works = something_works or bool(group.succeeded)
            missing = min(dropped, budget) - replaced
            if missing and something_works:  # an agent that always fails is told of at once, and not run as often again
                waiting += await enqueue(missing)
                replaced += missing
        return groups

    @property
    def idle_s(self) -> float:
        """Seconds in which no training rollout was in flight for want of a place, so far."""
        return 0.0

    def advance(self) -> None:
        """The weights of the batch that ``collect`` gave are in use, or it had nothing to train on."""

    def admitted(self) -> dict[str, int]:
        """``LoopState.admitted`` as it is now."""
        return {}

    async def validate(self, tasks: TaskCursor, n: int, *, resources_id: str | None = None) -> list[GroupResult]:
        """One rollout for each of ``n`` validation tasks, scored and never trained on; with other resources than those
        of training, where given."""
        waiting = await self._enqueue(tasks, n, size=1, mode="val", resources_id=resources_id)
        return [await self._next() for _ in range(waiting)]

    async def while_alive(self, work: asyncio.Future[Any]) -> Any:
        """The result of ``work``; it is given up when something that the run needs dies meanwhile."""
        work.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # when it is given up, nobody asks
        try:
            while True:
                # by the clock and not only when nothing happens: failures of a dead engine keep coming for a while
                if (now := time.monotonic()) - self._last_look >= _LOOK_INTERVAL_S:
                    self._last_look = now
                    self._raise_if_dead()
                done, _ = await asyncio.wait({work}, timeout=_LOOK_INTERVAL_S)
                if done:
                    return work.result()
        finally:
            work.cancel()

    async def cancel_outstanding(self) -> None:
        """What has not ended when the run does is counted as cancelled, and taken from the store's queue. Its groups
        are given up first: one that is told of its members' cancellation would count its task as dealt with."""
        outstanding = self._data_source.ledger.open_ids()
        if not outstanding:
            return
        self._data_source.abandon(outstanding, group_ids=self._waiting, reason="run_ended")
        cancelling = asyncio.gather(
            *(self._store.update_rollout(name, status="cancelled") for name in outstanding), return_exceptions=True
        )
        done, _ = await asyncio.wait({cancelling}, timeout=_CANCEL_TIMEOUT_S)
        if not done:
            cancelling.cancel()
            logger.warning("The store did not cancel %d rollouts within %g s.", len(outstanding), _CANCEL_TIMEOUT_S)

    async def _enqueue(
        self, tasks: TaskCursor, n: int, *, size: int, mode: Literal["train", "val"], resources_id: str | None = None
    ) -> int:
        """Enqueue the next ``n`` groups; returns how many."""
        groups = tasks.take(n)
        if mode == "train":
            self._admitted(groups)
        for group in groups:  # before they are enqueued: a rollout may end before the call below returns
            self._waiting[group.group_id] = tasks
            self._data_source.expect(group.group_id, size=size, mode=mode)
        limits = {"timeout_s": self._settings.rollout_timeout_s, "max_attempts": self._settings.max_attempts}
        about: dict[str, Any] = {**limits, **self.metadata}
        resources_id = resources_id or self.resources_id
        requests = enqueue_requests(groups, size=size, mode=mode, resources_id=resources_id, **about)
        rollouts = await self._store.enqueue_many_rollouts(requests)
        # at once and not in a thread, although a ledger on disk writes (0.04 ms per rollout): what a cancellation finds
        # enqueued, the ledger knows
        self._data_source.opened(rollouts)
        self._wake()
        return len(groups)

    def _admitted(self, groups: Sequence[TaskGroup]) -> None:
        """These training groups are about to be enqueued."""

    async def _next(self) -> GroupResult:
        """The next group of this phase that is finalized."""
        while True:
            group = await self.while_alive(asyncio.ensure_future(self._finalized.get()))
            if (tasks := self._waiting.pop(group.group_id, None)) is not None:
                tasks.done(group.group_id)
                return group
