"""Validations: synchronous, or concurrent with asynchronous training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from agl_slime import events
from agl_slime.data.results import MemberResult
from agl_slime.loop.metrics import FAILED_SHARE, eval_metrics, format_failures, reward_by_task
from agl_slime.loop.schedule import Schedule
from agl_slime.loop.settings import LoopSettings, LoopState
from agl_slime.loop.tasks import ValidationTasks
from agl_slime.metric_names import VAL_COUNT, VAL_EARLIER_REWARD_MEAN, VAL_FAILED, VAL_LAG, VAL_REWARD_MEAN

_START = "val/start_"


def _rename_start_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics of the validation before the first step, under their special names."""
    return {_START + name.removeprefix("val/"): value for name, value in metrics.items()}


class Validations:
    """Validations of ``tasks`` before the first iteration, after every ``eval_interval`` iterations and at the end;
    ``count`` is their number so far, ``first`` the rewards by task of the first.

    With ``max_staleness`` validations run concurrently with training, one at a time: one that becomes due during
    another starts after it, with the weights of that moment. ``version`` returns the current weight version;
    ``prepare(version)`` returns the resources id for its rollouts (``None``: training's), after it has loaded the
    version into a separate engine, if there is one (``own_engine``).
    """

    def __init__(
        self,
        *,
        tasks: ValidationTasks,
        settings: LoopSettings,
        schedule: Schedule,
        start: LoopState,
        version: Callable[[], str],
        emit: Callable[[events.Event], None],
        prepare: Callable[[str], Awaitable[str | None]],
        own_engine: bool,
    ) -> None:
        self._tasks, self._settings, self._schedule = tasks, settings, schedule
        self._version, self._emit, self._prepare, self._own_engine = version, emit, prepare, own_engine
        self.count, self.first = start.validations, start.val_first
        self._concurrent = settings.max_staleness > 0
        self._running: asyncio.Future[dict[str, Any]] | None = None
        self._due: int | None = None

    def start(self, done: int) -> None:
        """In asynchronous training, start the first validation, or one that a restart interrupted, after ``done``
        iterations."""
        if self._concurrent and self.count < 1 + done // self._settings.eval_interval:
            self._begin(done)

    async def before_iteration(self, iteration: int) -> dict[str, Any]:
        """The metrics of the validation before the first iteration; synchronous."""
        if self._concurrent or iteration > 1:
            return {}
        return _rename_start_metrics(await self._validate_now(iteration, done=0))

    async def after_iteration(self, iteration: int) -> dict[str, Any]:
        """Metrics of the validation to report with this iteration, if any."""
        last = iteration == self._settings.num_iterations
        due = last or iteration % self._settings.eval_interval == 0
        if not self._concurrent:
            return await self._validate_now(iteration, done=iteration) if due else {}
        if last:
            self._due = None
            ended = await self._wait_for_metrics()
            self._begin(iteration)
            earlier = {name: value for name, value in ended.items() if name.startswith(_START)}
            if VAL_REWARD_MEAN in ended:
                earlier[VAL_EARLIER_REWARD_MEAN] = ended[VAL_REWARD_MEAN]
            return {**earlier, **await self._wait_for_metrics()}
        metrics = self._take_metrics()
        if due:
            self._begin(iteration)
        return metrics

    async def wait(self) -> None:
        """Wait until the running validation ends."""
        if self._running is not None:
            await asyncio.wait({self._running})

    def cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()

    async def _validate_now(self, iteration: int, *, done: int) -> dict[str, Any]:
        self._emit(events.PhaseStarted(iteration=iteration, phase="eval", rollouts=self._settings.eval_rollouts))
        self.count += 1
        self._schedule.metadata = {"iteration": iteration, "weight_version": self._version()}
        resources_id = await self._prepare(self._version())
        return self._metrics_of(await self._schedule.validate(self._tasks, resources_id=resources_id), done)

    async def _validate_concurrently(self, iteration: int) -> dict[str, Any]:
        """Validate the current weights, on the separate engine if there is one, else ahead of the queue."""
        version = self._version()
        members = await self._schedule.validate(self._tasks, resources_id=await self._prepare(version))
        self.count += 1
        metrics = self._metrics_of(members, iteration)
        if iteration == 0:
            metrics = _rename_start_metrics(metrics)
        now = version if self._own_engine else self._version()
        if version.isdecimal() and now.isdecimal():
            metrics[VAL_LAG] = int(now) - int(version)
        return metrics

    def _metrics_of(self, members: Sequence[MemberResult], done: int) -> dict[str, Any]:
        """The metrics of a validation after ``done`` iterations; warns if many of its rollouts failed."""
        metrics = eval_metrics(members, first=self.first)
        self.first = self.first or reward_by_task(members)
        if (failed := metrics[VAL_FAILED]) > FAILED_SHARE * metrics[VAL_COUNT]:
            why = format_failures(members)
            which = f"validation after iteration {done}" if done else "validation before the first iteration"
            text = f"{which}: {failed} of {metrics[VAL_COUNT]} rollouts failed, and its mean leaves them out: {why}"
            self._emit(events.Warning(text=text, key="validation_failed"))
        return metrics

    def _begin(self, iteration: int) -> None:
        if self._running is None:
            self._running = asyncio.ensure_future(self._validate_concurrently(iteration))
            # marks the error as retrieved, for runs that end with another error
            self._running.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        else:
            self._due = iteration

    def _take_metrics(self) -> dict[str, Any]:
        """The metrics of a validation that ended since the last call; raises its error."""
        if self._running is None or not self._running.done():
            return {}
        metrics, self._running = self._running.result(), None
        if self._due is not None:
            due, self._due = self._due, None
            self._begin(due)
        return metrics

    async def _wait_for_metrics(self) -> dict[str, Any]:
        await self.wait()
        return self._take_metrics()
