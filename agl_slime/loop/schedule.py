"""When rollouts are admitted and which batch is trained on: as far ahead of training as the staleness limit allows.

With a limit of 0 nothing runs ahead: an iteration's groups are enqueued together, and nothing is trained on before each
of them has been finalized. Above 0 rollouts go on while a batch is trained on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from agl_slime.datasource.source import GroupSource
from agl_slime.errors import ConfigError, LoopError
from agl_slime.groups.results import GroupResult
from agl_slime.loop.admission import Admission
from agl_slime.loop.settings import LoopSettings, LoopState
from agl_slime.loop.tasks import TaskCursor, TaskGroup, enqueue_requests
from agl_slime.support.agl import LightningStore
from agl_slime.support.threads import run_user_code

logger = logging.getLogger(__name__)

# Between looks at whether runner, data source and engine live.
_LOOK_INTERVAL_S = 1.0
# When a run ends, a store that does not answer is left alone after this long: Ctrl-C must not wait for it.
_CANCEL_TIMEOUT_S = 1.0


class Schedule:
    """Keeps as many groups in flight as ``Admission`` lets in, and makes batches of those that have ended: ``collect``
    waits for the next batch, ``advance`` lets more in. ``raise_if_dead`` is called about once a second while something
    is waited for, ``wake`` after rollouts were enqueued."""

    def __init__(
        self,
        store: LightningStore,
        data_source: GroupSource,
        settings: LoopSettings,
        *,
        start: LoopState,
        raise_if_dead: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        self._store, self._data_source, self._settings = store, data_source, settings
        self._raise_if_dead, self._wake = raise_if_dead, wake
        self._last_look = float("-inf")
        self.resources_id: str | None = None  # that rollouts are enqueued with
        self.metadata: dict[str, Any] = {}  # of each rollout
        self._ahead = settings.max_staleness > 0
        self._admission = Admission(
            batch_size=settings.rollout_batch_size,
            max_staleness=settings.max_staleness,
            step=start.iteration,
            last_step=settings.num_iterations,
        )
        self._before = dict(start.admitted)
        self._waiting: dict[str, TaskCursor] = {}  # groups that have not been finalized
        self._validated: asyncio.Queue[GroupResult] = asyncio.Queue()
        self._ended: dict[int, GroupResult] = {}
        self._numbers: dict[str, int] = {}  # of groups in flight
        self._lost: list[int] = []  # groups that came to nothing, and have not been replaced
        self._taken: dict[str, int] = {}  # ready groups of the batch at hand, with the step at which each was admitted
        self._dropped: list[GroupResult] = []  # those that were, since the last batch
        self._something_works = False
        self._changed = asyncio.Event()
        self._drawing = asyncio.Lock()  # the functions of one agent may make the tasks of training and of validation
        self._tasks: TaskCursor | None = None
        self._filling: asyncio.Task[None] | None = None
        self._over = False
        self._idle_s, self._idle_since = 0.0, time.monotonic()
        for group in data_source.ready_groups():
            # with nothing ahead others may be ready too: what a training function took no interest in
            if self._ahead or group.instance_id in self._before:
                number = self._number(group.instance_id)
                self._admission.admit(number, at=self._before.pop(str(number), None))
                self._admission.end(number)
                self._ended[number] = group
        self._admission.check(cut_off=self._before)

    @property
    def idle_s(self) -> float:
        """Seconds in which no training rollout was in flight, so far."""
        now = 0.0 if self._admission.in_flight else time.monotonic() - self._idle_since
        return self._idle_s + now

    def finalized(self, group: GroupResult) -> None:
        """The data source has finalized a group."""
        if (tasks := self._waiting.pop(group.group_id, None)) is None:
            return
        tasks.done(group.group_id)
        if group.mode != "train":
            self._validated.put_nowait(group)
            return
        number = self._numbers.pop(group.group_id)
        self._admission.end(number)
        self._ended[number] = group
        self._something_works = self._something_works or bool(group.succeeded)
        if not group.ready:
            self._lost.append(number)
        if not self._admission.in_flight:
            self._idle_since = time.monotonic()
        self._replace()
        self._changed.set()

    async def collect(self, tasks: TaskCursor) -> list[GroupResult]:
        """The next batch, as soon as it can be made, and the groups that were dropped and replaced since the last one.
        With a limit above 0, what is ready of it is what the data source delivers next."""
        began, self._tasks = self._tasks is not None, tasks
        self._fill()
        if not began and self._filling is not None:
            # what a restart has cut off is older than what is ready, and has its place before it
            await self.await_with_health_check(self._filling)
        while (batch := self._admission.take()) is None:
            if self._filling is not None and self._filling.done():
                self._filling.result()  # raises what the store or the tasks have raised
            self._changed.clear()
            await self.await_with_health_check(asyncio.ensure_future(self._changed.wait()))
        groups = [self._ended.pop(number) for number in batch]
        ages = zip(groups, self._admission.batch.items(), strict=True)
        self._taken = {str(number): at for group, (number, at) in ages if group.ready}
        self._lost = [number for number in self._lost if number in self._ended]
        if self._ahead:
            self._data_source.reserve([group.succeeded[0].rollout_id for group in groups if group.ready])
        groups += self._dropped
        self._dropped = []
        self._something_works = any(group.succeeded for group in self._ended.values())
        return groups

    def reject(self) -> None:
        """Nothing of the batch that ``collect`` gave is trained on: ``collect`` again gives another for its step."""
        self._data_source.reserve(None)
        self._taken = {}
        self._admission.reject(self._settings.rollout_batch_size)

    def advance(self) -> None:
        """The weights of the batch that ``collect`` gave are in use, or it had nothing to train on."""
        self._admission.advance()
        self._taken = {}
        if not self._ahead:
            return
        if left := self._data_source.reserve(None):
            raise LoopError(
                f"slime_train_fn left {left} groups of its batch; with max_staleness it has to take them all"
            )
        self._fill()

    def admitted(self) -> dict[str, int]:
        """``LoopState.admitted`` as it is now: of a batch that was not trained on, too."""
        return {**self._admission.state(), **self._taken}

    async def validate(self, tasks: TaskCursor, n: int, *, resources_id: str | None = None) -> list[GroupResult]:
        """One rollout for each of ``n`` validation tasks, scored and never trained on; with other resources than those
        of training, where given."""
        await self._enqueue(tasks, n, size=1, mode="val", resources_id=resources_id)
        return [await self.await_with_health_check(asyncio.ensure_future(self._validated.get())) for _ in range(n)]

    async def await_with_health_check(self, work: asyncio.Future[Any]) -> Any:
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
        self._over = True
        if self._filling is not None:
            # to its end: what is enqueued and not in the ledger would never end there
            await asyncio.wait({self._filling}, timeout=_CANCEL_TIMEOUT_S)
            self._filling.cancel()
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

    def _fill(self) -> None:
        """Enqueue what may be admitted, without waiting for it."""
        if self._over or self._admission.free <= 0:
            return
        # one that has failed stays, for ``collect`` to tell of
        if self._filling is None or (self._filling.done() and self._filling.exception() is None):
            self._filling = asyncio.ensure_future(self._enqueue_free())
            self._filling.add_done_callback(lambda task: self._changed.set())

    async def _enqueue_free(self) -> None:
        assert self._tasks is not None
        while (n := self._admission.free) > 0:
            await self._enqueue(self._tasks, n, size=self._settings.n_samples_per_prompt, mode="train")

    async def _enqueue(
        self, tasks: TaskCursor, n: int, *, size: int, mode: Literal["train", "val"], resources_id: str | None = None
    ) -> None:
        """Enqueue the next ``n`` groups."""
        async with self._drawing:
            groups = await run_user_code(tasks.take, n)
        if mode == "train":
            self._admit(groups)
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

    def _admit(self, groups: Sequence[TaskGroup]) -> None:
        if not self._admission.in_flight:
            self._idle_s += time.monotonic() - self._idle_since
        for group in groups:
            number = self._numbers[group.group_id] = self._number(group.instance_id)
            self._admission.admit(number, at=self._before.pop(str(number), None))

    def _replace(self) -> None:
        """Let others in for groups that came to nothing, as often as the settings say; the others take up their places
        in a batch. An agent that always fails is told of at once, and not run as often again."""
        settings = self._settings
        most = settings.rollout_batch_size if settings.max_replaced_groups is None else settings.max_replaced_groups
        while self._something_works and self._lost and len(self._dropped) < most:
            number = self._lost.pop(0)
            self._admission.replace(number)
            self._dropped.append(self._ended.pop(number))
        self._fill()

    @staticmethod
    def _number(instance_id: str | None) -> int:
        if instance_id is None or not instance_id.isdecimal():
            raise ConfigError(
                f"a group names the instance {instance_id!r}; with max_staleness it must be its task's number"
            )
        return int(instance_id)
