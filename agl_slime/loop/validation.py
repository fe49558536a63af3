"""Validations: synchronous, or beside asynchronous training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from agl_slime import events
from agl_slime.loop.metrics import eval_metrics
from agl_slime.loop.schedule import Schedule
from agl_slime.loop.settings import LoopSettings
from agl_slime.loop.tasks import TaskCursor
from agl_slime.metric_names import (
    VAL_EARLIER_REWARD_MEAN,
    VAL_INTERVAL,
    VAL_LAG,
    VAL_REWARD_MEAN,
    VAL_START_INTERVAL,
    VAL_START_REWARD_MEAN,
)


def _of_the_start(metrics: dict[str, Any]) -> dict[str, Any]:
    """Those of the validation before the first step, under the names that they have there."""
    told = zip((VAL_START_REWARD_MEAN, *VAL_START_INTERVAL), (VAL_REWARD_MEAN, *VAL_INTERVAL), strict=True)
    return {name: metrics[ours] for name, ours in told}


class Validations:
    """Validations of ``tasks`` before the first iteration, after every ``eval_interval`` and at the end; ``count`` is
    how many there were.

    With ``max_staleness`` they run beside training, one at a time, and nothing waits for them: one that falls due while
    another runs begins when that has ended, with the weights of then. ``version`` tells the version in use;
    ``sync_engine`` brings it to an engine of their own and returns the resources to enqueue with.
    """

    def __init__(
        self,
        *,
        tasks: TaskCursor,
        settings: LoopSettings,
        schedule: Schedule,
        count: int,
        version: Callable[[], str],
        emit: Callable[[events.Event], None],
        sync_engine: Callable[[str], Awaitable[str]] | None,
    ) -> None:
        self._tasks, self._settings, self._schedule = tasks, settings, schedule
        self._version, self._emit, self._sync_engine = version, emit, sync_engine
        self.count = count
        tasks.skip_to(count * settings.eval_tasks)
        self._beside = settings.max_staleness > 0
        self._running: asyncio.Future[dict[str, Any]] | None = None
        self._due: int | None = None

    def start(self, done: int) -> None:
        """After ``done`` iterations: beside training the first one begins, or one that a restart has cut off."""
        if self._beside and self.count < 1 + done // self._settings.eval_interval:
            self._begin(done)

    async def before(self, iteration: int) -> dict[str, Any]:
        """The metrics of the validation before the first iteration; synchronous."""
        if self._beside or iteration > 1:
            return {}
        return _of_the_start(await self._in_turn(iteration))

    async def after(self, iteration: int) -> dict[str, Any]:
        """The metrics of a validation that belong to this iteration, if there are any."""
        last = iteration == self._settings.num_iterations
        due = last or iteration % self._settings.eval_interval == 0
        if not self._beside:
            return await self._in_turn(iteration) if due else {}
        if last:
            self._due = None
            earlier = await self._end()
            self._begin(iteration)
            if VAL_REWARD_MEAN in earlier:
                earlier[VAL_EARLIER_REWARD_MEAN] = earlier[VAL_REWARD_MEAN]
            return {**earlier, **await self._end()}
        metrics = self._ended()
        if due:
            self._begin(iteration)
        return metrics

    def cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()

    async def _in_turn(self, iteration: int) -> dict[str, Any]:
        self._emit(events.PhaseStarted(iteration=iteration, phase="eval", rollouts=self._settings.eval_tasks))
        self.count += 1
        self._schedule.metadata = {"iteration": iteration, "weight_version": self._version()}
        return eval_metrics(await self._schedule.validate(self._tasks, self._settings.eval_tasks))

    async def _aside(self, iteration: int) -> dict[str, Any]:
        """With the weights of now, on an engine of its own if there is one, else beside the queue."""
        version = self._version()
        resources_id = None if self._sync_engine is None else await self._sync_engine(version)
        groups = await self._schedule.validate(self._tasks, self._settings.eval_tasks, resources_id=resources_id)
        self.count += 1
        metrics = eval_metrics(groups)
        if iteration == 0:
            metrics = _of_the_start(metrics)
        now = self._version() if self._sync_engine is None else version
        if version.isdecimal() and now.isdecimal():
            metrics[VAL_LAG] = int(now) - int(version)
        return metrics

    def _begin(self, iteration: int) -> None:
        if self._running is None:
            self._running = asyncio.ensure_future(self._aside(iteration))
            # when the run ends with another error, nobody asks
            self._running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        else:
            self._due = iteration

    def _ended(self) -> dict[str, Any]:
        """The metrics of the one that has ended since the last call, or none; raises what it has raised."""
        if self._running is None or not self._running.done():
            return {}
        metrics, self._running = self._running.result(), None
        if self._due is not None:
            due, self._due = self._due, None
            self._begin(due)
        return metrics

    async def _end(self) -> dict[str, Any]:
        if self._running is not None:
            await asyncio.wait({self._running})
        return self._ended()
