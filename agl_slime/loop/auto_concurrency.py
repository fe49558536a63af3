"""``--max-concurrent auto`` while a run goes on: a look about every second, and the runner is told."""

from __future__ import annotations

import asyncio
import logging

from agl_slime.errors import EngineError
from agl_slime.runner.auto_limit import AutoLimit, Look
from agl_slime.runner.base import RunnerPool
from agl_slime.sglang.load import EngineLoads

logger = logging.getLogger(__name__)

_LOOK_S = 1.0


class AutoConcurrency:
    """Looks at the engine and tells the runner, from ``start`` to ``cancel``; ``limit`` is what was told last. Without
    ``loads`` it does nothing."""

    limit: int | None = None

    def __init__(self, loads: EngineLoads | None) -> None:
        self._loads = loads
        self._work: asyncio.Future[None] | None = None

    def start(self, runner: RunnerPool) -> None:
        if self._loads is not None:
            self._work = asyncio.ensure_future(self._keep_engine_full(runner, self._loads))

    def cancel(self) -> None:
        if self._work is not None:
            self._work.cancel()

    def raise_if_dead(self) -> None:
        """Raises ``ConfigError`` where the engine does not say how busy it is."""
        if self._work is not None and self._work.done():
            self._work.result()

    async def _keep_engine_full(self, runner: RunnerPool, loads: EngineLoads) -> None:
        auto = AutoLimit.start()
        try:
            while True:
                self.limit = auto.limit
                runner.set_limit(auto.limit)
                await asyncio.sleep(_LOOK_S)
                try:
                    now = await loads.look()
                except EngineError as error:  # the limit stays as it is
                    logger.debug("The engine did not say how busy it is: %s", error)
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
