"""A watchdog: a child process that still runs when code in this process holds the interpreter lock (GIL).

``watcher.py`` is the child's program. One thread of this process sends heartbeats. A process has at most one child.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, TypeVar

from agl_slime.support import watcher
from agl_slime.support.watcher import ROLLOUT, Frame

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

# A thread that gets this signal writes its stack. Real-time signals from the end of their range are rarely used.
_STACK_SIGNAL = getattr(signal, "SIGRTMAX", 0) and signal.SIGRTMAX - 3


def named(function: F, rollout_id: str) -> F:
    """A copy of ``function`` whose name has the rollout's id: names are all that another process sees of a stack."""
    assert isinstance(function, FunctionType)
    name = f"{ROLLOUT}{rollout_id}"
    code = function.__code__.replace(co_name=name, co_qualname=name)
    copy: Any = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    return copy


def stack_of(frame: FrameType) -> list[Frame]:
    """The frames of a stack, innermost first."""
    entries = traceback.walk_stack(frame)
    return [Frame(entry.f_code.co_filename, line or 0, entry.f_code.co_qualname) for entry, line in entries]


_lock = threading.Lock()
_active: Watch | None = None


class Watch:
    """``beat`` at least once a second, ``stop`` at the end, on any one thread.

    ``say_after_s``: seconds without a heartbeat after which it prints the code that holds the lock. ``kill_after_s``:
    seconds without a heartbeat, or of a blocked event loop, after which it kills the process; 0 is never. ``verdict``:
    descriptor of a ``multiprocessing`` connection that gets the reason of a kill. ``signals``: kill the process at the
    second SIGINT, SIGTERM or SIGHUP that it cannot handle, also without a terminal.
    """

    def __init__(
        self, *, say_after_s: float = 10.0, kill_after_s: float = 0.0, verdict: int = -1, signals: bool = False
    ) -> None:
        self._say_after_s, self._kill_after_s = say_after_s, kill_after_s
        self._verdict, self._signals = verdict, signals
        self._child: subprocess.Popen[bytes] | None = None
        self._open: list[int] = []
        self._registered: list[int] = []
        self._failed = False

    def beat(self, *, late_s: float, loop_thread: int) -> None:
        """Send a heartbeat; ``late_s`` is the time for which the event loop of that thread (its native id) has been
        blocked. The first one starts the child if the process has none."""
        global _active
        with _lock:
            _active = _active or self
            if _active is not self or self._failed:
                return
        if self._child is None:
            try:
                self._start()
            except OSError as error:
                self._failed = True
                logger.warning("Code that holds the interpreter lock will not be detected: %s", error)
                return
        assert self._child is not None
        assert self._child.stdin is not None
        with suppress(BlockingIOError, BrokenPipeError):  # the child was killed or is stopped
            os.write(self._child.stdin.fileno(), f"{late_s:.2f} {loop_thread}\n".encode())

    def stop(self) -> None:
        """End the child."""
        global _active
        for number in self._registered:
            faulthandler.unregister(number)
        if self._child is not None:
            assert self._child.stdin is not None
            self._child.stdin.close()
            try:
                self._child.wait(2.0)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        for descriptor in self._open:
            os.close(descriptor)
        self._child, self._open, self._registered = None, [], []
        with _lock:
            _active = None if _active is self else _active

    def _start(self) -> None:
        (stacks, write_stack), (heard, write_heard) = os.pipe(), os.pipe()
        self._open = [write_stack, write_heard]
        number = _STACK_SIGNAL if self._register(_STACK_SIGNAL, write_stack) else 0
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if self._signals else ():
            self._register(each, write_heard, chain=True)
        fixed = os.getpid(), 0, stacks, heard, self._verdict, number, self._say_after_s, self._kill_after_s
        inherited = [stacks, heard, *([self._verdict] if self._verdict >= 0 else [])]
        command = [sys.executable, "-I", "-S", str(Path(watcher.__file__)), *map(str, fixed)]
        try:
            self._child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=inherited)
        finally:
            os.close(stacks)
            os.close(heard)
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)

    def _register(self, number: int, descriptor: int, *, chain: bool = False) -> bool:
        """Have the thread that gets the signal write its stack; without ``chain`` only if the signal has no handler."""
        if not number or (not chain and signal.getsignal(number) is not signal.SIG_DFL):
            return False
        os.set_blocking(descriptor, False)  # the handler must never block
        faulthandler.register(number, file=descriptor, all_threads=False, chain=chain)
        self._registered.append(number)
        return True
