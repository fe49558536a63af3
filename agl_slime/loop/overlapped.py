"""The overlapped schedule: rollouts go on while a batch is trained on, as far ahead as the staleness limit allows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from agl_slime.errors import ConfigError, LoopError
from agl_slime.groups.results import GroupResult
from agl_slime.loop.admission import Admission
from agl_slime.loop.schedule import SerialSchedule
from agl_slime.loop.settings import LoopState
from agl_slime.loop.tasks import TaskCursor, TaskGroup

# When a run ends, a store that does not answer is left alone after this long.
_FILL_TIMEOUT_S = 1.0


class OverlappedSchedule(SerialSchedule):
    """Keeps as many groups in flight as ``Admission`` lets in, and makes batches of those that have ended. The same
    iterations as the serial schedule: ``collect`` waits for the next batch, ``advance`` lets more in."""

    def __init__(self, *parts: Any, start: LoopState) -> None:
        super().__init__(*parts)
        settings = self._settings
        self._admission = Admission(
            batch_size=settings.rollout_batch_size,
            max_staleness=settings.max_staleness,
            step=start.iteration,
            last_step=settings.num_iterations,
        )
        self._before = dict(start.admitted)
        self._ended: dict[int, GroupResult] = {}
        self._numbers: dict[str, int] = {}  # of groups in flight
        self._lost: list[int] = []  # groups that came to nothing, and have not been replaced
        self._dropped: list[GroupResult] = []  # those that were, since the last batch
        self._something_works = False
        self._changed = asyncio.Event()
        self._tasks: TaskCursor | None = None
        self._filling: asyncio.Task[None] | None = None
        self._over = False
        self._idle_s, self._idle_since = 0.0, time.monotonic()
        for group in self._data_source.ready_groups():
            number = self._number(group.instance_id)
            self._admission.admit(number, at=self._before.get(str(number)))
            self._admission.end(number)
            self._ended[number] = group
        self._admission.check()

    @property
    def idle_s(self) -> float:
        """Seconds in which no training rollout was in flight, so far."""
        now = 0.0 if self._admission.in_flight else time.monotonic() - self._idle_since
        return self._idle_s + now

    def finalized(self, group: GroupResult) -> None:
        if group.mode != "train":
            super().finalized(group)
        if group.mode != "train" or (tasks := self._waiting.pop(group.group_id, None)) is None:
            return
        tasks.done(group.group_id)
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
        What is ready of it is what the data source delivers next."""
        began, self._tasks = self._tasks is not None, tasks
        self._fill()
        if not began and self._filling is not None:
            # what a restart has cut off is older than what is ready, and has its place before it
            await self.while_alive(self._filling)
        while (batch := self._admission.take()) is None:
            if self._filling is not None and self._filling.done():
                self._filling.result()  # raises what the store or the tasks have raised
            self._changed.clear()
            await self.while_alive(asyncio.ensure_future(self._changed.wait()))
        groups = [self._ended.pop(number) for number in batch]
        self._lost = [number for number in self._lost if number in self._ended]
        self._data_source.reserve([group.succeeded[0].rollout_id for group in groups if group.ready])
        groups += self._dropped
        self._dropped = []
        self._something_works = any(group.succeeded for group in self._ended.values())
        return groups

    def advance(self) -> None:
        if left := self._data_source.reserve(None):
            raise LoopError(
                f"slime_train_fn left {left} groups of its batch; with max_staleness it has to take them all"
            )
        self._admission.advance()
        self._fill()

    def admitted(self) -> dict[str, int]:
        return self._admission.state()

    async def cancel_outstanding(self) -> None:
        self._over = True
        if self._filling is not None:
            # to its end: what is enqueued and not in the ledger would never end there
            await asyncio.wait({self._filling}, timeout=_FILL_TIMEOUT_S)
            self._filling.cancel()
        await super().cancel_outstanding()

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

    def _admitted(self, groups: Sequence[TaskGroup]) -> None:
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
