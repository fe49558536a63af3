"""Threads for code that blocks: sync agents, judges, long tokenizing.

The standard library joins its executor's threads when the interpreter exits, so one agent that hangs in a thread would
keep the process alive for ever. These threads are daemons: what hangs is abandoned. The caller's context variables are
visible in the thread, so spans find their rollout.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

from typing_extensions import ParamSpec

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreadPool(Executor):
    """An executor of at most ``max_workers`` daemon threads, started as they are needed."""

    def __init__(self, *, max_workers: int, name: str) -> None:
        self._max_workers = max_workers
        self._name = name
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._outstanding = 0
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the thread pool {self._name} is closed")
            self._outstanding += 1
            if self._outstanding > self._threads and self._threads < self._max_workers:
                self._threads += 1
                threading.Thread(target=self._serve, name=f"{self._name}-{self._threads}", daemon=True).start()
        self._work.put((future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Let idle threads end. Never waits: a thread that hangs cannot be stopped."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in range(self._threads):
                self._work.put(None)

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # belongs to whoever waits for the future
                    future.set_exception(error)
            del item, future, call
            with self._lock:
                self._outstanding -= 1


# Enough for judges that wait on a network; the event loops stay free whatever happens here.
_shared_pool = DaemonThreadPool(max_workers=64, name="agl-slime-worker")


async def run_in_thread(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``fn(*args, **kwargs)`` in a daemon thread that sees the caller's context variables."""
    context = contextvars.copy_context()
    call = partial(context.run, fn, *args, **kwargs)
    return await asyncio.wrap_future(_shared_pool.submit(call))


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, for code that is not async; also where the calling thread has a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work))
        except BaseException as error:  # belongs to the caller
            failure.append(error)

    thread = threading.Thread(target=run, name="agl-slime-blocking", daemon=True)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]
