"""Threads for sync agents: one per rollout, daemons, so that what hangs is abandoned and never keeps the process alive.

How many run at once is bounded by how many rollouts the runner claims. A thread that was abandoned at its rollout's
time limit goes on until it returns; it is counted, and rollouts stop being claimed when as many hang as may run.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any


class SyncThreads:
    """Runs sync calls, each in a thread of its own that sees the caller's context."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0

    @property
    def running(self) -> int:
        """Threads that have not returned, abandoned ones included."""
        return self._running

    async def run(self, name: str, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(*args)``. When the caller is cancelled the thread is left alone and its result dropped."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        context = contextvars.copy_context()

        def settle(result: Any, error: BaseException | None) -> None:
            if not future.done():
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

        def call() -> None:
            result, error = None, None
            try:
                result = context.run(fn, *args)
            except StopIteration as stop:  # a future cannot hold one
                error = RuntimeError(f"the agent raised {stop!r}")
            except BaseException as raised:  # belongs to whoever waits for the future
                error = raised
            with self._lock:
                self._running -= 1
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:
                return  # the loop is closed: the thread outlived its runner, and nobody waits

        with self._lock:
            self._running += 1
        threading.Thread(target=call, name=name, daemon=True).start()
        return await future


__all__ = ["SyncThreads"]
