"""Notices code that blocks an event loop, and names it.

A timer on the loop notes the time every quarter of a second; a thread looks at the note, and when it is old, at what
the loop's thread is doing. A busy machine makes the note old as well: the loop's thread is accused only when it runs
somebody's code, and has spent its CPU time there or stands still in it.
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

logger = logging.getLogger(__name__)

_TICK_S = 0.25
# Frames of these packages are how the agent's code is called, not what it does.
_PLUMBING = [
    "asyncio",
    "agl_slime/runner",
    "agentlightning",
    "opentelemetry",
    "concurrent/futures",
    "threading.py",
    "contextvars",
]


class LagMonitor:
    """Warns once per loop when nothing else ran on it for ``threshold_s``; ``start`` and ``stop`` on the loop."""

    def __init__(self, *, agent_name: str, threshold_s: float = 1.0) -> None:
        self._agent_name = agent_name
        self._threshold_s = threshold_s
        self._ticked = self._ticked_cpu = 0.0
        self._stopped = threading.Event()
        self._ticker: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._clock: int | None = None
        self.warning: str | None = None
        """What was warned about."""

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        clock_of: Any = getattr(time, "pthread_getcpuclockid", None)  # of a thread, to be read from others
        self._clock = clock_of(self._loop_thread) if clock_of is not None else None
        self._tick()
        threading.Thread(target=self._watch, name="agl-slime-lag-monitor", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        if self._ticker is not None:
            self._ticker.cancel()

    def _tick(self) -> None:
        assert self._loop is not None
        self._ticked, self._ticked_cpu = time.monotonic(), self._cpu_s()
        self._ticker = self._loop.call_later(_TICK_S, self._tick)

    def _watch(self) -> None:
        before: tuple[float, str] | None = None
        while not self._stopped.wait(_TICK_S):
            ticked, late_s = self._ticked, time.monotonic() - self._ticked - _TICK_S
            frame = sys._current_frames().get(self._loop_thread)
            if late_s <= self._threshold_s or frame is None or not _runs_a_callback(frame):
                before = None  # in time, or waiting in its selector for the machine
                continue
            place = _place_of(frame)
            computes = self._cpu_s() - self._ticked_cpu >= late_s / 2
            if computes or before == (ticked, place):
                self._warn(place)
                return
            before = ticked, place

    def _cpu_s(self) -> float:
        """CPU time of the loop's thread; where the system does not tell, the time of day, as if it never waited."""
        return time.monotonic() if self._clock is None else time.clock_gettime(self._clock)

    def _warn(self, place: str) -> None:
        try:
            task = asyncio.current_task(self._loop)
        except RuntimeError:
            task = None
        rollout = f" in rollout {task.get_name()}" if task is not None else ""
        self.warning = (
            f"{self._agent_name} blocks the runner's event loop: nothing else ran for {self._threshold_s:g} s"
            f"{rollout}, at {place}; use async calls, `asyncio.to_thread`, or a sync rollout()."
        )
        logger.warning(self.warning)


def _runs_a_callback(frame: FrameType) -> bool:
    codes = [entry.f_code for entry, _ in traceback.walk_stack(frame)]
    return any(code.co_name == "_run" and code.co_filename.endswith("events.py") for code in codes)


def _place_of(frame: FrameType) -> str:
    """The innermost line that is neither plumbing nor the standard library's, else the innermost line."""
    stack = traceback.extract_stack(frame)
    own = [entry for entry in stack if not any(part in entry.filename.replace("\\", "/") for part in _PLUMBING)]
    users = [entry for entry in own if not entry.filename.startswith((sys.prefix, sys.base_prefix))]
    chosen = (users or own or stack)[-1]
    return f"{chosen.filename}:{chosen.lineno} ({chosen.name})"
