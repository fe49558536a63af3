"""Enqueueing of rollouts as far ahead of training as the staleness limit allows, and batches for training.

With a limit of 0 training is synchronous: an iteration's groups are enqueued together, and all of them are finalized
before training. Above 0 rollouts continue during training.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from agl_slime.data.enqueueing import HealthCheck, TaskGroup, enqueue_groups, enqueue_requests, run_rollouts
from agl_slime.data.results import GroupResult, MemberResult
from agl_slime.data.source import GroupSource
from agl_slime.errors import ConfigError, LoopError
from agl_slime.loop.admission import Admission
from agl_slime.loop.settings import LoopSettings, LoopState
from agl_slime.loop.tasks import TaskCursor, ValidationTasks
from agl_slime.support.agl import LightningStore, Rollout
from agl_slime.support.threads import run_user_code

logger = logging.getLogger(__name__)

# At the end of a run Ctrl-C must not wait for a store that does not answer.
_CANCEL_TIMEOUT_S = 1.0
_RUN_ENDED = "run_ended"
_PILOTS = 8  # dropped pilots that are replaced, for each place of a batch


class Schedule:
    """Keeps as many groups in flight as ``Admission`` allows, and forms batches of finished groups: ``collect`` waits
    for the next batch, ``advance`` admits more groups. ``health`` is checked during waits, ``wake`` is called after
    rollouts were enqueued."""

    def __init__(
        self,
        store: LightningStore,
        data_source: GroupSource,
        settings: LoopSettings,
        *,
        start: LoopState,
        health: HealthCheck,
        wake: Callable[[], None],
    ) -> None:
        self._store, self._data_source, self._settings = store, data_source, settings
        self._health, self._wake = health, wake
        self.resources_id: str | None = None  # of new rollouts
        self.metadata: dict[str, Any] = {}  # of new rollouts
        self.oldest_version: int | None = None  # the oldest weights that may answer new training rollouts
        self._ahead = settings.max_staleness > 0
        self._admission = Admission(
            batch_size=settings.rollout_batch_size,
            max_staleness=settings.max_staleness,
            step=start.iteration,
            last_step=settings.num_iterations,
            in_order=settings.deterministic,
        )
        self._restored = dict(start.admitted)  # admission steps from before the restart
        self._ended: dict[int, GroupResult] = {}
        self._numbers: dict[str, int] = {}  # of groups in flight
        self._dropped: list[int] = []  # dropped groups that have not been replaced
        self._current_batch: dict[str, int] = {}  # its ready groups, with their admission steps
        self._unlearned: list[GroupResult] = []  # groups of batches since the last ``advance``
        self._replaced: list[GroupResult] = []  # dropped groups that were replaced since the last batch
        self._any_succeeded = False
        self._changed = asyncio.Event()
        self._drawing = asyncio.Lock()  # training and validation tasks may come from the same function of an agent
        self._tasks: TaskCursor | None = None
        self._enqueueing: asyncio.Task[None] | None = None
        self._stopped = False
        self._idle_s, self._idle_since = 0.0, time.monotonic()
        for group in data_source.ready_groups():
            # synchronous mode: skip ready groups that are not in the checkpoint
            if self._ahead or group.instance_id in self._restored:
                number = self._number(group.instance_id)
                self._admission.admit(number, step=self._restored.pop(str(number), None))
                self._admission.end(number)
                self._ended[number] = group
        self._admission.check(interrupted=self._restored)

    @property
    def idle_s(self) -> float:
        """Seconds so far without a training rollout in flight."""
        now = 0.0 if self._admission.in_flight else time.monotonic() - self._idle_since
        return self._idle_s + now

    def finalized(self, group: GroupResult) -> None:
        """Callback of the data source for each finalized group."""
        if self._tasks is None or (number := self._numbers.pop(group.group_id, None)) is None:
            return
        self._tasks.done(group.group_id)
        self._admission.end(number)
        self._ended[number] = group
        self._any_succeeded = self._any_succeeded or bool(group.succeeded)
        if not group.ready:
            self._dropped.append(number)
        if not self._admission.in_flight:
            self._idle_since = time.monotonic()
        self._replace()
        self._changed.set()

    async def collect(self, tasks: TaskCursor) -> list[GroupResult]:
        """Wait for the next batch; returns it with the dropped groups that were replaced since the last one. With a
        staleness limit above 0, the data source delivers the batch's ready groups next."""
        began, self._tasks = self._tasks is not None, tasks
        self._start_enqueueing()
        if not began and self._enqueueing is not None:
            # interrupted groups of a resumed run are older than its ready ones: admit them first
            await self._health.wait(self._enqueueing)
        while (batch := self._admission.take()) is None:
            if self._enqueueing is not None and self._enqueueing.done():
                self._enqueueing.result()  # raises an error of the store or the tasks
            self._changed.clear()
            await self._health.wait(self._changed.wait())
        groups = [self._ended.pop(number) for number in batch]
        ages = zip(groups, self._admission.batch.items(), strict=True)
        self._current_batch = {str(number): step for group, (number, step) in ages if group.ready}
        self._dropped = [number for number in self._dropped if number in self._ended]
        self._data_source.reserve([group.succeeded[0].rollout_id for group in groups if group.ready])
        if not self._ahead:
            self._data_source.reserve(None)  # in the order of draw, without a limit
        groups += self._replaced
        self._replaced = []
        self._unlearned += groups
        self._any_succeeded = any(group.succeeded for group in self._ended.values())
        return groups

    async def drain(self) -> None:
        """Wait until no training rollout is in flight."""
        while self._admission.in_flight or (self._enqueueing is not None and not self._enqueueing.done()):
            self._changed.clear()
            await self._health.wait(self._changed.wait())

    def reject(self) -> None:
        """Discard the current batch without training on it; the next ``collect`` returns another for the same step."""
        self._data_source.reserve(None)
        self._current_batch = {}
        self._admission.reject(self._settings.rollout_batch_size)

    def advance(self) -> None:
        """Admit more groups after a training step: the new weights are in use, or the batch had no ready group."""
        self._admission.advance()
        if self._tasks is not None:
            self._tasks.learned(self._unlearned)
        self._unlearned = []
        # an interrupted group for which no place was left, as dropped ones were drawn again before it, gets a new age
        self._restored = {}
        self._current_batch = {}
        if not self._ahead:
            return
        if undelivered := self._data_source.reserve(None):
            fix = "with max_staleness it must take the whole batch"
            raise LoopError(f"slime_train_fn left {undelivered} groups of its batch; {fix}")
        self._start_enqueueing()

    def admitted(self) -> dict[str, int]:
        """``LoopState.admitted`` for a checkpoint, including the current batch until it is trained on."""
        return {**self._admission.state(), **self._current_batch}

    async def validate(self, tasks: ValidationTasks, *, resources_id: str | None = None) -> list[MemberResult]:
        """Results of one rollout for each validation task, never trained on; ``resources_id`` replaces the resources of
        training."""
        groups = await self._draw(tasks.draw)
        enqueue = partial(self._enqueue, size=1, mode="val", resources_id=resources_id)
        results = run_rollouts(self._data_source, groups, enqueue, health=self._health, cancel_reason=_RUN_ENDED)
        return [member async for member in results]

    def stop(self) -> None:
        """Begin no further groups at the end of a run: one begun beside its last checkpoint would never be trained."""
        self._stopped = True

    async def cancel_outstanding(self) -> None:
        """Cancel unfinished rollouts at the end of a run, in the ledger and in the store. Their groups are abandoned
        first: finalized by the cancellation, a group would count its task as finished."""
        self.stop()
        if self._enqueueing is not None:
            # let it finish: rollouts that are enqueued but not in the ledger would never end there
            await asyncio.wait({self._enqueueing}, timeout=_CANCEL_TIMEOUT_S)
            self._enqueueing.cancel()
        outstanding = self._data_source.ledger.open_ids()
        if not outstanding:
            return
        self._data_source.abandon(outstanding, group_ids=self._numbers, reason=_RUN_ENDED)
        cancelling = asyncio.gather(
            *(self._store.update_rollout(name, status="cancelled") for name in outstanding), return_exceptions=True
        )
        done, _ = await asyncio.wait({cancelling}, timeout=_CANCEL_TIMEOUT_S)
        if not done:
            cancelling.cancel()
            logger.warning("The store did not cancel %d rollouts within %g s.", len(outstanding), _CANCEL_TIMEOUT_S)

    def _start_enqueueing(self) -> None:
        """Start to enqueue as many groups as may be admitted."""
        if self._stopped or self._admission.free <= 0:
            return
        # a failed task stays: ``collect`` raises its error
        if self._enqueueing is None or (self._enqueueing.done() and self._enqueueing.exception() is None):
            self._enqueueing = asyncio.ensure_future(self._enqueue_groups())
            self._enqueueing.add_done_callback(lambda task: self._changed.set())

    async def _enqueue_groups(self) -> None:
        assert self._tasks is not None
        size = self._settings.n_samples_per_prompt
        enqueue = partial(self._enqueue, size=size, mode="train")
        while (n := self._admission.free) > 0:
            groups = await self._draw(self._tasks.take, n)
            if self._stopped:
                return
            self._admit(groups)
            await enqueue_groups(self._data_source, groups, enqueue, size=size, mode="train")

    async def _draw(self, draw: Callable[..., list[TaskGroup]], *args: int) -> list[TaskGroup]:
        async with self._drawing:
            return await run_user_code(draw, *args)

    async def _enqueue(
        self, groups: Sequence[TaskGroup], *, size: int, mode: Literal["train", "val"], resources_id: str | None = None
    ) -> Sequence[Rollout]:
        limits = {"timeout_s": self._settings.rollout_timeout_s, "max_attempts": self._settings.max_attempts}
        oldest = self.oldest_version if mode == "train" else None
        options: dict[str, Any] = {**limits, "seed": self._settings.seed, "oldest_version": oldest, **self.metadata}
        resources_id = resources_id or self.resources_id
        requests = enqueue_requests(groups, size=size, mode=mode, resources_id=resources_id, **options)
        if mode == "train" and (pilot := self._settings.group_pilot):
            requests = self._data_source.hold_back(requests, size=size, pilot=pilot)
        rollouts = await self._store.enqueue_many_rollouts(requests)
        self._wake()
        return rollouts

    def _admit(self, groups: Sequence[TaskGroup]) -> None:
        if not self._admission.in_flight:
            self._idle_s += time.monotonic() - self._idle_since
        for group in groups:
            number = self._numbers[group.group_id] = self._number(group.instance_id)
            self._admission.admit(number, step=self._restored.pop(str(number), None))

    def _replace(self) -> None:
        """Replace dropped groups, as many as the settings allow; further dropped groups occupy places in a batch. While
        every rollout fails, nothing is replaced, so that the run stops early."""
        settings = self._settings
        if (limit := settings.max_replaced_groups) is None:
            limit = settings.rollout_batch_size * (_PILOTS if settings.group_pilot else 1)
        while self._any_succeeded and self._dropped and len(self._replaced) < limit:
            number = self._dropped.pop(0)
            self._admission.replace(number)
            self._replaced.append(self._ended.pop(number))
        self._start_enqueueing()

    @staticmethod
    def _number(instance_id: str | None) -> int:
        if instance_id is None or not instance_id.isdecimal():
            raise ConfigError(
                f"a group has the instance {instance_id!r}; with max_staleness it must be its task's number"
            )
        return int(instance_id)
