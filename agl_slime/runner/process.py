"""Process-wide changes that only a worker or the command line makes by itself.

A program that imports this package as a library can ask for them with ``configure_worker_process``.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from agl_slime.store.recording import Recording, current_recording
from agl_slime.support.net import bypass_proxies
from agl_slime.support.terminal import log_plainly
from agl_slime.support.watch import call_named

# Of the garbage collector's three generations.
_THRESHOLDS = (100_000, 5, 50)
_DEFAULTS = {(700, 10, 10), (2_000, 10, 0), (2_000, 10, 10)}

_configured = False


def configure_worker_process() -> None:
    """Log plain text; carry recordings into threads; collect garbage less often, unless the program has set thresholds,
    and never scan imported modules. Called before other imports it saves a second of them. Without it, with 4,096
    rollouts in flight, full collections took 40 % of the CPU time and stopped the event loop for up to half a second,
    and freed nothing."""
    global _configured
    if not _configured:
        _configured = True
        log_plainly()
        bypass_proxies()
        carry_recordings()
        gc.freeze()
        if gc.get_threshold() in _DEFAULTS:
            gc.set_threshold(*_THRESHOLDS)


def freeze_gc() -> None:
    """Exclude the existing objects from garbage collection (not from reference counts) in a configured process."""
    if _configured:
        gc.collect()
        gc.freeze()


def carry_recordings() -> None:
    """Make ``threading.Thread.start`` and ``ThreadPoolExecutor.submit`` pass on the recording of the caller's context.

    Python runs both in an empty context (before 3.14, and there by default), in which a span would belong to no
    rollout. ``asyncio.to_thread`` carries the whole context; ``run_in_executor`` calls ``submit``.
    """
    start: Callable[..., None] = threading.Thread.start
    submit: Callable[..., Future[Any]] = ThreadPoolExecutor.submit

    def start_with_recording(self: threading.Thread) -> None:
        recording = current_recording.get()
        if recording is not None and not recording.closed and "run" not in vars(self):
            run = self.run

            def run_with_recording() -> None:
                vars(self).pop("run", None)  # break the thread's reference cycle
                current_recording.set(recording)
                call_named(recording.rollout_id, run)

            self.run = run_with_recording  # type: ignore[method-assign]
        start(self)

    def submit_with_recording(
        executor: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        # also without a recording: the worker thread may have been started inside a rollout
        return submit(executor, _with_recording, current_recording.get(), fn, *args, **kwargs)

    threading.Thread.start = start_with_recording
    ThreadPoolExecutor.submit = submit_with_recording


def _with_recording(recording: Recording | None, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    token = current_recording.set(recording)
    try:
        return call_named(recording.rollout_id if recording is not None else "", fn, *args, **kwargs)
    finally:
        current_recording.reset(token)
