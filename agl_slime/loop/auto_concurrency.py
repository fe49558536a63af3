"""``--max-concurrent auto``: adapts the number of rollouts in flight to the engine's load, about every second."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace

from agl_slime.engine.client.load import EngineLoad, EngineLoads
from agl_slime.errors import EngineError
from agl_slime.runner.base import RunnerPool

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
MOST = 4096  # the highest limit
_FIRST = 8  # the limit at the start; only refused calls lower it further
_QUEUE, _LONG_QUEUE = 0.1, 0.3  # the target, and above which the limit is lowered: shares of the running requests
_RAISE_BY = 1.5  # after slow start
_FULL = 0.9  # KV cache usage above which the limit is not raised: running requests still grow
_LOOKS = 3  # that are averaged after slow start


@dataclass(frozen=True, kw_only=True)
class AutoLimit:
    """The current limit and its history; ``step`` returns the next state, by the engine's load and the rollouts in
    flight: enough to keep the engine full with a short queue.

    The limit doubles while no request waits (slow start). After the first queue it rises by half at a time while no
    request waits, and falls to the running requests plus a short queue when many wait. Refused calls (429, 503) lower
    it by their number and a tenth. It is raised only when reached: otherwise tasks or the staleness limit decide.
    """

    limit: int = _FIRST
    slow_start: bool = True
    capacity: int = 0
    """Requests in the engine when it last refused a call; 0 = none refused yet."""
    recent: tuple[EngineLoad, ...] = ()
    """Loads since the last change of the limit."""

    def step(self, look: EngineLoad, *, in_flight: int) -> AutoLimit:
        ending = in_flight > self.limit
        if look.refused and not ending:
            # each refused call is a rollout too many, or a repeated call; the engine has room for its current requests
            capacity = look.running + look.waiting
            limit = min(self.limit, max(in_flight - look.refused, capacity) * 9 // 10)
            return replace(self._at(limit), capacity=capacity)
        if not look.running:
            return self  # paused for new weights, or idle
        recent = (*self.recent, look)[-_LOOKS:]
        now = replace(self, recent=recent)
        if len(recent) < (1 if self.slow_start and not look.waiting else _LOOKS):
            return now
        running, waiting = (sum(getattr(one, name) for one in recent) / len(recent) for name in ("running", "waiting"))
        if waiting > max(2.0, _LONG_QUEUE * running):
            if ending:
                return now  # an earlier cut is still taking effect
            fits = round(in_flight - waiting + max(1.0, _QUEUE * running))
            return self._at(max(fits, min(self.limit, _FIRST)))
        if ending:
            return self._at(in_flight)  # the queue is short already: cut no further
        if waiting >= max(1.0, _QUEUE * running) or look.usage >= _FULL:
            return replace(now, slow_start=False)
        if in_flight < 0.9 * self.limit:
            return now  # the limit does not bind
        return self._raised(look, calls=running + waiting)

    def _raised(self, look: EngineLoad, *, calls: float) -> AutoLimit:
        """The raised limit, within the engine's room as far as that is known."""
        factor = 2.0 if self.slow_start else _RAISE_BY
        most = min(filter(None, ((1 + _QUEUE) * look.most_running, float(self.capacity))), default=0.0)
        if most and calls:  # calls grow in proportion to rollouts, some of which run their tools
            factor = min(factor, max(1.0, most / calls))
        if look.usage > 0:
            factor = min(factor, max(1.0, _FULL / look.usage))
        return replace(self._at(max(int(self.limit * factor), self.limit + 1)), slow_start=self.slow_start)

    def _at(self, limit: int) -> AutoLimit:
        return replace(self, limit=min(max(1, limit), MOST), slow_start=False, recent=())


class AutoConcurrency:
    """Sets the runner's ``limit`` of rollouts in flight by the engine's load, from ``start`` to ``cancel``. Without
    ``loads`` it does nothing."""

    limit: int | None = None

    def __init__(self, loads: EngineLoads | None) -> None:
        self._loads = loads
        self._task: asyncio.Future[None] | None = None

    def start(self, runner: RunnerPool) -> None:
        if self._loads is not None:
            self._task = asyncio.ensure_future(self._keep_engine_full(runner, self._loads))

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def raise_if_dead(self) -> None:
        """Raise ``ConfigError`` when the engine does not report its load."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def _keep_engine_full(self, runner: RunnerPool, loads: EngineLoads) -> None:
        auto = AutoLimit()
        try:
            while True:
                self.limit = auto.limit
                runner.set_limit(auto.limit)
                await asyncio.sleep(_LOOK_S)
                try:
                    load = await loads.look()
                except EngineError as error:  # keep the limit
                    logger.debug("The engine did not report its load: %s", error)
                    continue
                auto = auto.step(load, in_flight=runner.in_flight)
        finally:
            await loads.aclose()
