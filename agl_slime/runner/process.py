"""What is done in a process that is this package's own, a worker's or the command line's, and in no other.

All of it changes the whole process, so a library that is imported into somebody else's does none of it by itself; who
wants it there calls ``configure_worker_process``.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from agl_slime.store.recording import Recording, current_recording
from agl_slime.support.net import bypass_proxies
from agl_slime.support.watch import named

# Allocations until the young are looked at; such looks until the next older are; and those until all are.
_THRESHOLDS = (100_000, 5, 50)
_DEFAULTS = {(700, 10, 10), (2_000, 10, 0), (2_000, 10, 10)}

_owned = False


def configure_worker_process() -> None:
    """From now on runners of this process carry recordings into threads, and the garbage collector looks more rarely,
    unless the program has set limits of its own, and never at what has been imported. Before other imports this saves a
    second of them; with 4,096 rollouts in flight full collections took 40 % of the CPU time and stopped the event loop
    for up to half a second, and found nothing."""
    global _owned
    if not _owned:
        _owned = True
        bypass_proxies()
        carry_recordings()
        gc.freeze()
        if gc.get_threshold() in _DEFAULTS:
            gc.set_threshold(*_THRESHOLDS)


def is_ours() -> bool:
    """Whether this process is this package's own."""
    return _owned


def freeze_gc() -> None:
    """The garbage collector never looks again at what exists now (it is freed by its reference counts as before); does
    nothing in a process that is somebody else's."""
    if _owned:
        gc.collect()
        gc.freeze()


def carry_recordings() -> None:
    """``threading.Thread.start`` and ``ThreadPoolExecutor.submit`` hand the recording of whoever calls them on, and
    nothing else of the context.

    Python gives both an empty context (until 3.14, and there only by a switch), so that a span of such a thread would
    belong to no rollout. ``asyncio.to_thread`` carries the whole context; ``run_in_executor`` goes through ``submit``.
    """
    start: Callable[..., None] = threading.Thread.start
    submit: Callable[..., Future[Any]] = ThreadPoolExecutor.submit

    def start_with_recording(self: threading.Thread) -> None:
        recording = current_recording.get()
        if recording is not None and not recording.closed and "run" not in vars(self):
            run = self.run

            def run_with_recording() -> None:
                vars(self).pop("run", None)  # the thread no longer refers to itself
                current_recording.set(recording)
                named(_called, recording.rollout_id)(run)

            self.run = run_with_recording  # type: ignore[method-assign]
        start(self)

    def submit_with_recording(
        executor: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        # also outside of any rollout: the worker thread may have been started by one
        return submit(executor, _with_recording, current_recording.get(), fn, *args, **kwargs)

    threading.Thread.start = start_with_recording
    ThreadPoolExecutor.submit = submit_with_recording


def _with_recording(recording: Recording | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    token = current_recording.set(recording)
    called = named(_called, recording.rollout_id) if recording is not None else _called
    try:
        return called(fn, *args, **kwargs)
    finally:
        current_recording.reset(token)


def _called(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return fn(*args, **kwargs)
