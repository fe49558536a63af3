"""``RunnerThread``: a runner in a background thread of this process, with its own event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Self

from agl_slime.errors import LoopError
from agl_slime.runner.base import FinishedListener, RunnerPool
from agl_slime.runner.concurrent import ConcurrentRunner, RunnerSettings
from agl_slime.support.agl import LightningStore, LitAgent, threaded
from agl_slime.support.threads import LoopThread

logger = logging.getLogger(__name__)


class RunnerThread(RunnerPool):
    """Runs a ``ConcurrentRunner`` on a thread. A store that other threads use too must be thread-safe; an
    ``InMemoryLightningStore`` gets Agent Lightning's wrapper for threads."""

    def __init__(
        self,
        *,
        agent: LitAgent[Any],
        store: LightningStore,
        settings: RunnerSettings | None = None,
        on_finished: FinishedListener | None = None,
        name: str | None = None,
    ) -> None:
        self.runner = ConcurrentRunner(settings=settings, on_finished=on_finished, name=name)
        self._agent = agent
        self._store: LightningStore = threaded(store)
        self._thread: LoopThread | None = None

    @property
    def failure(self) -> BaseException | None:
        return None if self._thread is None else self._thread.failure

    def start(self) -> Self:
        if self._thread is not None:
            raise LoopError("The runner was started already; make a new RunnerThread to run again.")
        self._thread = LoopThread(self._serve, name="agl-slime-runner")
        self._thread.start()
        if self.failure is not None:
            raise LoopError(f"The runner could not start: {self.failure}") from self.failure
        return self

    def wake(self) -> None:
        self.runner.wake()

    def stop(self, *, cancel: bool = True, timeout_s: float = 10.0) -> bool:
        if self._thread is None:
            return True
        self.runner.stop(cancel=cancel)
        if not self._thread.join(timeout_s):
            place = self._thread.blocked_at()
            why = f"{place} blocks its event loop" if place else "its rollouts have not ended"
            logger.warning("The runner did not stop within %g s: %s.", timeout_s, why)
            return False
        return True

    async def _serve(self, ready: Callable[[], None]) -> None:
        with self.runner.run_context(agent=self._agent, store=self._store):
            asyncio.get_running_loop().call_soon(ready)
            await self.runner.iter()
