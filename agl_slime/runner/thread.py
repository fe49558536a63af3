"""A runner in a background thread of this process, with an event loop of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from typing import Any

from agl_slime.errors import LoopError
from agl_slime.runner.base import FinishedListener
from agl_slime.runner.concurrent import ConcurrentRunner, RunnerSettings
from agl_slime.support.agl import Hook, LightningStore, LitAgent

logger = logging.getLogger(__name__)


class RunnerThread:
    """Runs a ``ConcurrentRunner`` on a thread; a context manager that leaves nothing running.

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
        self._failure: BaseException | None = None

    def start(self) -> RunnerThread:
        if self._thread is not None:
            raise LoopError("The runner was started already; make a new RunnerThread to run again.")
        ready = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="agl-slime-runner", daemon=True)
        self._thread.start()
        ready.wait()
        if self._failure is not None:
            raise LoopError(f"The runner could not start: {self._failure}") from self._failure
        return self

    def wake(self) -> None:
        """Look at the queue now."""
        self.runner.wake()

    @property
    def failure(self) -> BaseException | None:
        """What ended the runner, when it was not ``stop``."""
        return self._failure

    def stop(self, *, cancel: bool = True, timeout_s: float = 10.0) -> bool:
        """Stop claiming, cancel (or finish) what is in flight, end the thread. ``False`` when it did not end in time
        (an agent that blocks its event loop)."""
        if self._thread is None:
            return True
        self.runner.stop(cancel=cancel)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("The runner did not stop within %g s: some agent blocks its event loop.", timeout_s)
            return False
        return True

    def __enter__(self) -> RunnerThread:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _main(self, ready: threading.Event) -> None:
        try:
            asyncio.run(self._serve(ready))
        except BaseException as error:  # a thread's exception reaches nobody else: keep it for start() and the loop
            self._failure = error
            logger.error("The runner ended: %s", error, exc_info=error)
        finally:
            ready.set()

    async def _serve(self, ready: threading.Event) -> None:
        with self.runner.run_context(agent=self._agent, store=self._store, hooks=self._hooks):
            asyncio.get_running_loop().call_soon(ready.set)
            await self.runner.iter()
