"""``LagMonitor``: finds and names code that blocks an event loop, or that holds the interpreter lock of its process.

A timer on the loop stores the time every quarter of a second. A thread reads it, and when it is old, the stack of the
loop's thread. A busy machine delays the timer as well: a warning is written only if the loop's thread runs user code
and has spent its CPU time there, or stays at one place in it. The thread itself stops while code holds the interpreter
lock: a child process (``agl_slime.support.watch``), one per process, gets its heartbeats.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import subprocess
import sys
import threading
import time

from agl_slime.runner.base import RunnerSettings
from agl_slime.support import watch
from agl_slime.support.watch import STACK_SIGNAL, place_of, rollout_in, stack_of, users_frame

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_NAME_AFTER_S = 10.0  # healthy code never holds the interpreter lock for this long
_ADVICE = "--rollout-timeout is the limit, --resume goes on, --runners process:N loses the rollout only (docs/scale.md)"

_lock = threading.Lock()
_monitors: list[LagMonitor] = []  # the first one's child watches this process


class LagMonitor:
    """Warns once per loop when user code blocks it for ``lag_warning_s``, and ends a process that is stuck.

    Call its methods on the loop. ``reason_fd`` marks a worker process, which may hold the interpreter lock or block the
    loop for ``stuck_after_s``: the descriptor of the connection that gets the reason, or -1.
    """

    def __init__(self, settings: RunnerSettings, *, reason_fd: int | None = None) -> None:
        self._threshold_s, self._stuck_s = settings.lag_warning_s, settings.stuck_after_s
        self._reason_fd, self._worker = -1 if reason_fd is None else reason_fd, reason_fd is not None
        self._advice = "other workers retry its rollouts" if self._worker else _ADVICE
        self._limit_s = self._stuck_s
        self._ticked = self._ticked_cpu = 0.0
        self._stopped = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._last_block: tuple[float, str] | None = None
        self.warning: str | None = None
        """The text of the warning."""

    def start(self) -> None:
        self._loop, self._loop_thread = asyncio.get_running_loop(), threading.get_ident()
        # the thread's CPU clock, which other threads can read, or one as if it never waited
        self._clock: int = getattr(time, "pthread_getcpuclockid", lambda _: time.CLOCK_MONOTONIC)(self._loop_thread)
        self._tick()
        self._stopped.clear()
        if self._stuck_s:
            _monitors.append(self)
            self._beat()
        self._thread = threading.Thread(target=self._monitor, name="agl-slime-lag-monitor", daemon=True)
        self._thread.start()

    def extend_limit(self, limit_s: float) -> None:
        """Let the code of a rollout with this time limit hold the interpreter lock as long; in a worker half as long at
        most, before the store cancels the worker's other rollouts at their limits."""
        longest_s = min(self._limit_s, max(_NAME_AFTER_S, limit_s / 2)) if self._worker else max(self._limit_s, limit_s)
        if longest_s != self._limit_s and self._stuck_s:
            self._limit_s = longest_s
            for monitor in _monitors[:1]:
                monitor._beat()

    def stop(self) -> None:
        self._stopped.set()
        self._ticker.cancel()
        self._thread.join()
        with _lock:
            _monitors[:] = (monitor for monitor in _monitors if monitor is not self)
            if self._child is not None:
                with self._child as child:
                    child.kill()
                self._child = None

    def _tick(self) -> None:
        self._ticked, self._ticked_cpu = time.monotonic(), self._cpu_s()
        self._ticker = self._loop.call_later(_TICK_S, self._tick)

    def _monitor(self) -> None:
        while not self._stopped.wait(_TICK_S):
            self._beat()
            late_s = time.monotonic() - self._ticked - _TICK_S
            if self._worker and late_s > self._limit_s > 0:
                stack = stack_of(sys._current_frames()[self._loop_thread])
                reason = f"since its event loop was blocked for {late_s:.0f} s in {place_of(stack)}"
                watch.kill(os.getpid(), self._reason_fd, reason, rollout_in(stack), self._advice)
            if late_s > self._threshold_s > 0 and self.warning is None:
                self._check(late_s)

    # -- the child ----------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        """Send a heartbeat to the child, which is started if the process has none."""
        with _lock:
            if self not in _monitors[:1]:
                return
            try:
                self._child = self._child or self._start_child()
                assert self._child.stdin is not None
                self._child.stdin.write(f"beat {max(each._limit_s for each in _monitors)}\n".encode())
            except BrokenPipeError:
                return  # the child was killed
            except OSError as error:
                _monitors.remove(self)
                logger.warning("Code that holds the interpreter lock will not be detected: %s", error)

    def _start_child(self) -> subprocess.Popen[bytes]:
        arguments = os.getpid(), self._reason_fd, min(_NAME_AFTER_S, self._stuck_s / 2), self._advice
        command = [sys.executable, "-I", "-S", watch.__file__, *map(str, arguments)]
        inherited = [self._reason_fd] * (self._reason_fd >= 0)
        # a session of its own: the terminal's signals do not reach it
        child = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, pass_fds=inherited, start_new_session=True)
        assert child.stdin is not None
        os.set_blocking(child.stdin.fileno(), False)  # the handler of the signal must never block
        if STACK_SIGNAL:  # from now on: a signal without a handler ends the process
            faulthandler.register(STACK_SIGNAL, file=child.stdin.fileno(), all_threads=False)
        return child

    # -- the warning --------------------------------------------------------------------------------------------------

    def _check(self, late_s: float) -> None:
        ticked, stack = self._ticked, stack_of(sys._current_frames()[self._loop_thread])
        # none in its selector, for a busy machine, in code of this package or of a library's callback, or in an import
        if users_frame(stack) is None or not any(frame.function == "Handle._run" for frame in stack):
            return
        previous, self._last_block = self._last_block, (ticked, place_of(stack))
        if self._cpu_s() - self._ticked_cpu < late_s / 2 and previous != self._last_block:
            return
        problem = f"{place_of(stack)} blocks the runner's event loop: nothing else ran for {self._threshold_s:g} s"
        self.warning = f"{problem}; use async calls, `asyncio.to_thread`, or a sync rollout()."
        logger.warning(self.warning)

    def _cpu_s(self) -> float:
        return time.clock_gettime(self._clock)
