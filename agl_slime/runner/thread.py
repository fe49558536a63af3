"""A runner in a background thread of this process, with an event loop of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from typing import Any

from typing_extensions import Self

from agl_slime.errors import LoopError
from agl_slime.runner.base import FinishedListener, RunnerPool
from agl_slime.runner.concurrent import ConcurrentRunner, RunnerSettings
from agl_slime.support.agl import Hook, LightningStore, LitAgent

logger = logging.getLogger(__name__)


class RunnerThread(RunnerPool):
    """Runs a ``ConcurrentRunner`` on a thread.

    The store must be thread-safe when other threads write to it too (``InMemoryLightningStore(thread_safe=True)``, or
    any HTTP client store).
    """

    def __init__(
        self,
        *,
        agent: LitAgent[Any],
        store: LightningStore,
        settings: RunnerSettings | None = None,
        hooks: Sequence[Hook] = (),
        on_finished: FinishedListener | None = None,
        name: str | None = None,
    ) -> None:
        self.runner = ConcurrentRunner(settings=settings, on_finished=on_finished, name=name)
        self._agent = agent
        self._store = store
        self._hooks = hooks
        self._thread: threading.Thread | None = None

    def start(self) -> Self:
        if self._thread is not None:
            raise LoopError("The runner was started already; make a new RunnerThread to run again.")
        ready = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="agl-slime-runner", daemon=True)
        self._thread.start()
        ready.wait()
        if self.failure is not None:
            raise LoopError(f"The runner could not start: {self.failure}") from self.failure
        return self

    def wake(self) -> None:
        self.runner.wake()

    def stop(self, *, cancel: bool = True, timeout_s: float = 10.0) -> bool:
        if self._thread is None:
            return True
        self.runner.stop(cancel=cancel)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("The runner did not stop within %g s: some agent blocks its event loop.", timeout_s)
            return False
        return True

    def _main(self, ready: threading.Event) -> None:
        try:
            asyncio.run(self._serve(ready))
        except BaseException as error:  # a thread's exception reaches nobody else: keep it for start() and the loop
            self.failure = error
            logger.error("The runner ended: %s", error, exc_info=error)
        finally:
            ready.set()

    async def _serve(self, ready: threading.Event) -> None:
        with self.runner.run_context(agent=self._agent, store=self._store, hooks=self._hooks):
            asyncio.get_running_loop().call_soon(ready.set)
            await self.runner.iter()
