"""Carries the current recording into threads and executors.

Python gives a new thread, and a call in a ``ThreadPoolExecutor``, an empty context (until 3.14, and there only by a
switch). Under stock Agent Lightning that does not matter, for one process runs one rollout; here a span of such a
thread would belong to nobody. While a tracer is active, ``threading.Thread.start`` and ``ThreadPoolExecutor.submit``
hand the recording of whoever calls them on, and nothing else of the context. ``asyncio.to_thread`` carries the whole
context by itself; ``loop.run_in_executor`` goes through ``submit``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from agl_slime.runner.recording import Recording, current_recording

_lock = threading.Lock()
_users = 0
_start: Callable[..., None] = threading.Thread.start
_submit: Callable[..., Future[Any]] = ThreadPoolExecutor.submit


def propagate() -> None:
    """Begin to carry recordings; counted, so every call needs its ``stop_propagating``."""
    global _users, _start, _submit
    with _lock:
        _users += 1
        if _users == 1:
            _start, _submit = threading.Thread.start, ThreadPoolExecutor.submit
            threading.Thread.start = _start_with_recording
            ThreadPoolExecutor.submit = _submit_with_recording


def stop_propagating() -> None:
    """The last one puts back what was there, unless somebody else has replaced it since: then theirs stays, and calls
    ours, which does no harm."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            if threading.Thread.start is _start_with_recording:
                threading.Thread.start = _start
            if ThreadPoolExecutor.submit is _submit_with_recording:
                ThreadPoolExecutor.submit = _submit


class _Call:
    """A call that belongs to a recording, or to none."""

    __slots__ = ("_fn", "_recording")

    def __init__(self, fn: Callable[..., Any], recording: Recording | None) -> None:
        self._fn = fn
        self._recording = recording

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        token = current_recording.set(self._recording)
        try:
            return self._fn(*args, **kwargs)
        finally:
            current_recording.reset(token)


def _start_with_recording(self: threading.Thread) -> None:
    recording = current_recording.get()
    if recording is not None and not recording.closed and "run" not in vars(self):
        run = self.run

        def run_with_recording() -> None:
            vars(self).pop("run", None)  # the thread no longer refers to itself
            current_recording.set(recording)
            run()

        self.run = run_with_recording  # type: ignore[method-assign]
    _start(self)


def _submit_with_recording(
    executor: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Future[Any]:
    # Also outside of any rollout: the worker thread may have been started by one.
    return _submit(executor, _Call(fn, current_recording.get()), *args, **kwargs)


__all__ = ["propagate", "stop_propagating"]
