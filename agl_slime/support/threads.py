"""Threads for blocking calls, in two pools: this package's work, and users' code.

A user's reward or tool that hangs can then never take a thread from the train step, a checkpoint or ``stop``. All
threads are daemons: the standard library joins its executors' threads when the interpreter exits, so one hanging call
would keep the process alive for ever. Threads see the caller's context variables, so spans find their rollout.
``LoopThread`` runs an event loop on a thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from typing_extensions import ParamSpec

from agl_slime.errors import RolloutError
from agl_slime.support.watch import Frame, call_named, place_of, stack_of, users_frame

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

_IDLE_S = 30.0  # an idle thread ends after this
_CANCEL_S = 1.0  # limit for cancelled tasks to end when their loop ends
_SLOW_S = 1.0  # a call that was abandoned sooner, by Ctrl-C for example, may not hang


def usable_cores() -> int:
    """Number of cores that this process may use, at most ``OMP_NUM_THREADS`` if that is set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(limit)) if limit.isdigit() and int(limit) else cores


class _Job(Future[Any]):
    """A call, and the future of its result."""

    def __init__(self, name: str, call: Callable[[], Any]) -> None:
        super().__init__()
        self.name, self.call = name, call
        self.started: float | None = None


class ThreadPool:
    """Runs calls in at most ``max_running`` daemon threads, started on demand.

    A call whose caller was cancelled continues until it returns: its thread is *abandoned*, no longer counts towards
    ``max_running``, and is replaced.

    Args:
        max_abandoned: makes this a pool for users' code. While that many threads are abandoned, further calls are
            refused with a ``RolloutError`` (reason ``threads_hung``); the first slow one logs a warning. Exceptions
            that would end more than a rollout (``SystemExit``, ``KeyboardInterrupt``, ``StopIteration``) become a
            ``RolloutError`` whose reason is the name of their class.
        lasting: an idle thread does not end before ``close``.
    """

    def __init__(self, *, name: str, max_running: int, max_abandoned: int | None = None, lasting: bool = False) -> None:
        self._name = name
        self._max_running = max_running
        self._max_abandoned = max_abandoned
        self._lasting = lasting
        self._work: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0  # without abandoned ones
        self._outstanding = 0  # waiting and running jobs, without abandoned ones
        self._abandoned: set[_Job] = set()
        self._warned = False
        if max_abandoned is not None:
            _user_pools.add(self)

    @property
    def abandoned(self) -> int:
        """Number of threads whose call has outlived its caller and not returned."""
        return len(self._abandoned)

    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """``fn(*args, **kwargs)`` in a thread that sees the caller's context variables."""
        job = self.submit(fn, *args, **kwargs)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            self._abandon(job)
            raise

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> _Job:
        """As ``run``, for synchronous code."""
        name = getattr(fn, "__qualname__", type(fn).__name__)
        call: Callable[[], Any] = partial(fn, *args, **kwargs)
        call = call if self._max_abandoned is None else partial(_call_as_rollout_error, name, call)
        job = _Job(name, partial(contextvars.copy_context().run, call))
        with self._lock:
            if self._max_abandoned is not None and len(self._abandoned) >= self._max_abandoned:
                raise RolloutError(
                    f"{name} was not called: {len(self._abandoned)} earlier calls hang in their threads, among them "
                    f"{next(iter(self._abandoned)).name}; add time limits to their waits.",
                    reason="threads_hung",
                )
            self._outstanding += 1
            self._start_thread_if_needed()
        self._work.put(job)
        return job

    def close(self) -> None:
        """End an idle thread after the submitted jobs."""
        self._work.put(None)

    def _start_thread_if_needed(self) -> None:
        if self._outstanding > self._threads and self._threads < self._max_running:
            self._threads += 1
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()

    def _abandon(self, job: _Job) -> None:
        with self._lock:
            if job.done() or job.started is None:  # _next skips a cancelled job that has not started
                return
            self._abandoned.add(job)
            self._outstanding -= 1
            self._threads -= 1
            self._start_thread_if_needed()
            ran_s = time.monotonic() - job.started
            warn = not self._warned and ran_s >= _SLOW_S
            self._warned = self._warned or warn
        if warn and self._max_abandoned is not None:
            logger.warning(
                "%s has not returned after %.1f s when its rollout ended: its thread is abandoned (up to %d may be).",
                job.name,
                ran_s,
                self._max_abandoned,
            )

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            result: Any = None
            error: BaseException | None = None
            if job.started is not None:
                try:
                    result = job.call()
                except StopIteration as raised:  # a future cannot raise it: its caller would wait for ever
                    error = RuntimeError(f"{job.name} raised StopIteration")
                    error.__cause__ = raised
                except BaseException as raised:  # re-raised in the caller
                    error = raised
            with self._lock:
                replaced = job in self._abandoned
                self._abandoned.discard(job)
                self._outstanding -= not replaced
                if error is not None:
                    job.set_exception(error)
                elif job.started is not None:
                    job.set_result(result)
            if replaced:
                return
            del job, result, error

    def _next(self) -> _Job | None:
        """The next job, started unless its caller was cancelled; ``None`` when this thread should end."""
        while True:
            try:
                job = self._work.get(timeout=None if self._lasting else _IDLE_S)
            except queue.Empty:
                job = None
            if job is None:
                with self._lock:
                    if self._outstanding < self._threads:
                        self._threads -= 1
                        return None
                continue
            with self._lock:
                if job.set_running_or_notify_cancel():
                    job.started = time.monotonic()
            return job


def _call_as_rollout_error(name: str, call: Callable[[], T]) -> T:
    """The result of ``call``; raises a ``RolloutError`` for exceptions that would end more than a rollout."""
    try:
        return call_named(current_rollout.get(), call)
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, StopIteration):  # a future cannot raise it
            raise
        raise RolloutError(f"{name} raised {error!r}.", reason=type(error).__name__) from error


current_rollout: contextvars.ContextVar[str] = contextvars.ContextVar("agl_slime_rollout", default="")
"""The id of the rollout that this context runs, shown in its stack."""

_user_pools: WeakSet[ThreadPool] = WeakSet()
_package_pool = ThreadPool(name="agl-slime-worker", max_running=64)
# 64: enough for judges that wait on a network; further calls queue.
_user_code_pool = ThreadPool(name="agl-slime-user-code", max_running=64, max_abandoned=256)


run_in_thread = _package_pool.run
"""Runs this package's blocking work: train steps, saving, starting and stopping, tokenizing. Never users' code."""

run_user_code = _user_code_pool.run
"""Runs users' synchronous code: rewards, tools, schedulers, prompts. See ``ThreadPool`` for its exceptions."""


async def run_in_thread_if(heavy: bool, work: Callable[[], T]) -> T:
    """The result of ``work``, which runs in a thread if it is ``heavy``."""
    return await run_in_thread(work) if heavy else work()


async def call_user_code(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """The result of a user's function or callable object: awaited if it is async, else by ``run_user_code``."""
    if inspect.iscoroutinefunction(fn) or inspect.iscoroutinefunction(getattr(fn, "__call__", None)):  # noqa: B004
        return await fn(*args, **kwargs)
    result = await run_user_code(fn, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def abandoned_threads() -> int:
    """Number of threads of users' code in this process that have outlived their rollouts, for metrics."""
    return sum(pool.abandoned for pool in list(_user_pools))


class LoopThread:
    """A daemon thread with an event loop that runs ``main`` to its end; ``main`` calls its argument once it is ready.
    Its exception is kept in ``failure``."""

    def __init__(self, main: Callable[[Callable[[], None]], Coroutine[Any, Any, None]], *, name: str) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.failure: BaseException | None = None
        self._main = main
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread; returns when ``main`` is ready or has ended."""
        self._thread.start()
        self._ready.wait()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def call(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call ``callback`` on the loop, from any thread; no effect before the loop runs or after it has ended."""
        with suppress(RuntimeError):
            if self.loop is not None:
                self.loop.call_soon_threadsafe(callback, *args)

    def blocked_at(self) -> str | None:
        """The place of users' code that runs on the loop now, or ``None``."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return place_of(stack) if frame is not None and users_frame(stack := stack_of(frame)) else None

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end; ``False`` after a timeout, and on the thread itself."""
        if self.alive and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self.alive

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self.failure = error
            if self._ready.is_set():
                logger.error("The thread %s ended: %s", self._thread.name, error)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        try:
            await self._main(self._ready.set)
        finally:
            await _cancel_other_tasks()


async def _cancel_other_tasks() -> None:
    """Cancel the other tasks of this loop, and forget tasks that ignore it: asyncio would wait for them for ever."""
    if not (tasks := asyncio.all_tasks() - {asyncio.current_task()}):
        return
    for task in tasks:
        task.cancel()
    _, ignoring = await asyncio.wait(tasks, timeout=_CANCEL_S)
    for task in ignoring:
        asyncio._unregister_task(task)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    if ignoring:
        places = sorted({_task_location(task) for task in ignoring})
        logger.warning("%d tasks ignored their cancellation and are abandoned: %s.", len(ignoring), ", ".join(places))


def _task_location(task: asyncio.Task[Any]) -> str:
    """The place at which a task waits: in users' code, else in its innermost coroutine."""
    stack: list[Frame] = []
    waits: Any = task.get_coro()
    while (inner := getattr(waits, "cr_frame", None)) is not None:
        stack.insert(0, Frame(inner.f_code.co_filename, inner.f_lineno, inner.f_code.co_qualname))
        waits = waits.cr_await
    return place_of(stack) if stack else task.get_name()


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, for synchronous code; also on a thread with a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    return _package_pool.submit(asyncio.run, work).result()
