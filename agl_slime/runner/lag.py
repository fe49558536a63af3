"""``LagMonitor``: finds and names code that blocks an event loop, or the whole process.

A timer on the loop stores the time every quarter of a second. A thread reads it, and when it is old, the stack of the
loop's thread. A busy machine delays the timer as well: a warning is written only if the loop's thread runs user code
and has spent its CPU time there, or stays at one place in it. The same thread sends the heartbeats of the process watch
(``agl_slime.support.watch``), which stop while code holds the interpreter lock.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any

from agl_slime.support.watch import Watch, stack_of
from agl_slime.support.watcher import rollout_in, users_frame

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_BEAT_S = 1.0


class LagMonitor:
    """Warns once per loop when user code blocks it for ``threshold_s`` (0: never), and beats the process ``watch``.
    Call ``start`` and ``stop`` on the loop."""

    def __init__(self, *, threshold_s: float = 1.0, watch: Watch | None = None) -> None:
        self._threshold_s = threshold_s
        self._watch = watch
        self._ticked = self._ticked_cpu = 0.0
        self._stopped = threading.Event()
        self._ticker: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = self._native_thread = 0
        self._clock: int | None = None
        self._before: tuple[float, str] | None = None
        self.warning: str | None = None
        """The text of the warning."""

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread, self._native_thread = threading.get_ident(), threading.get_native_id()
        clock_of: Any = getattr(time, "pthread_getcpuclockid", None)  # a CPU clock that other threads can read
        self._clock = clock_of(self._loop_thread) if clock_of is not None else None
        self._tick()
        threading.Thread(target=self._monitor, name="agl-slime-lag-monitor", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        if self._ticker is not None:
            self._ticker.cancel()

    def _tick(self) -> None:
        assert self._loop is not None
        self._ticked, self._ticked_cpu = time.monotonic(), self._cpu_s()
        self._ticker = self._loop.call_later(_TICK_S, self._tick)

    def _monitor(self) -> None:
        last_beat = -_BEAT_S
        try:
            while not self._stopped.is_set():
                if self._watch is not None and time.monotonic() - last_beat >= _BEAT_S:
                    last_beat = time.monotonic()
                    late_s = max(0.0, last_beat - self._ticked - _TICK_S)
                    self._watch.beat(late_s=late_s, loop_thread=self._native_thread)
                self._stopped.wait(_TICK_S)
                if self._threshold_s and self.warning is None:
                    self._check()
        finally:
            if self._watch is not None:
                self._watch.stop()

    def _check(self) -> None:
        before, self._before = self._before, None
        ticked, late_s = self._ticked, time.monotonic() - self._ticked - _TICK_S
        frame = sys._current_frames().get(self._loop_thread)
        if late_s <= self._threshold_s or frame is None or not _runs_a_callback(frame):
            return  # on time, or waiting in its selector for a busy machine
        stack = stack_of(frame)
        if (culprit := users_frame(stack)) is None:
            return  # code of this package or of a library's callback, or an import, which happens once
        place = f"{culprit.path}:{culprit.line} ({culprit.function})"
        if self._cpu_s() - self._ticked_cpu < late_s / 2 and before != (ticked, place):
            self._before = ticked, place
            return
        rollout = rollout_in(stack)
        self.warning = (
            f"{culprit.function} blocks the runner's event loop: nothing else ran for {self._threshold_s:g} s"
            f"{f' in rollout {rollout}' if rollout else ''}, at {culprit.path}:{culprit.line}; use async calls, "
            "`asyncio.to_thread`, or a sync rollout()."
        )
        logger.warning(self.warning)

    def _cpu_s(self) -> float:
        """CPU time of the loop's thread; without such a clock wall time, as if the thread never waited."""
        return time.monotonic() if self._clock is None else time.clock_gettime(self._clock)


def _runs_a_callback(frame: FrameType) -> bool:
    codes = [entry.f_code for entry, _ in traceback.walk_stack(frame)]
    return any(code.co_name == "_run" and code.co_filename.endswith("events.py") for code in codes)
