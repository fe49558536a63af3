"""``--max-concurrent auto``: adapts the number of rollouts in flight to the engine's load, about every second."""

from __future__ import annotations

import asyncio
import logging

from agl_slime.engine.client.load import EngineLoads
from agl_slime.errors import EngineError
from agl_slime.runner.auto_limit import AutoLimit, Look
from agl_slime.runner.base import RunnerPool

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


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
        auto = AutoLimit.start()
        try:
            while True:
                self.limit = auto.limit
                runner.set_limit(auto.limit)
                await asyncio.sleep(_LOOK_S)
                try:
                    now = await loads.look()
                except EngineError as error:  # keep the limit
                    logger.debug("The engine did not report its load: %s", error)
                    continue
                look = Look(
                    in_flight=runner.in_flight,
                    running=now.running,
                    waiting=now.waiting,
                    usage=now.usage,
                    most_running=now.most_running,
                    refused=now.refused,
                )
                auto = auto.step(look)
        finally:
            await loads.aclose()
