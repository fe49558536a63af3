"""The program of the watchdog process, and functions on stacks.

Code that holds Python's interpreter lock (GIL), such as a regular expression that backtracks, stops every thread and
every signal handler of its process. This process counts the seconds since the last heartbeat, has the stuck thread
write its stack (``faulthandler``, which needs no lock), and prints its place. It kills a worker process after
``kill_after_s``, and any other after its second Ctrl-C. ``agl_slime.support.watch`` starts it by path and without
``site``: it imports only the standard library.
"""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROLLOUT = "rollout "
"""Functions with this name and an id call the code of that rollout (``agl_slime.support.watch.named``)."""

_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARY = str(Path(os.__file__).parent)
_LOOK_S = 0.5
_DEAF_AFTER_S = 2.0  # a process without a heartbeat for this long cannot handle a signal
_DUMP_S = 1.0  # limit for writing a stack, which takes milliseconds
_MOST_THREADS = 64
_HANDLER_S = 0.1  # limit for the end of a signal handler after it has written its stack
_SAMPLE_S = 0.2  # for measuring the CPU time of threads
_STUCK = "This process no longer runs Python code"
_KILLED = "it is killed after %g s, and other workers retry its rollouts."
_NOT_KILLED = (
    "no time limit reaches that: Ctrl-C twice ends the process, and --runners process:N replaces such workers "
    "(docs/scale.md)."
)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class Frame(NamedTuple):
    path: str
    line: int
    function: str


def users_frame(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame of users' code, which is neither this package's, the standard library's nor an installed
    package's. ``stack`` is innermost first. ``None`` if there is none, or while a module is imported."""
    if any(frame.path.startswith("<frozen importlib") for frame in stack):
        return None
    return next((frame for frame in stack if _is_users(frame)), None)


def rollout_in(stack: Iterable[Frame]) -> str | None:
    """The id of the rollout whose code a stack runs."""
    names = (frame.function for frame in stack)
    return next((name.removeprefix(ROLLOUT) for name in names if name.startswith(ROLLOUT)), None)


def _is_users(frame: Frame) -> bool:
    path = frame.path
    if path.startswith(("<", _PACKAGE + os.sep)) or frame.function.startswith(ROLLOUT):
        return False
    return not (path.startswith(_LIBRARY + os.sep) or {"site-packages", "dist-packages"} & set(Path(path).parts))


class Watcher:
    """Watches the process ``pid``. At ``signal_number`` a thread of it writes its stack to ``stacks``; it writes to
    ``heard`` at each of its signals. ``verdict`` gets the reason of a kill."""

    def __init__(
        self,
        *,
        pid: int,
        beats: int,
        stacks: int,
        heard: int,
        verdict: int,
        signal_number: int,
        say_after_s: float,
        kill_after_s: float,
    ) -> None:
        self._pid, self._beats, self._stacks, self._heard, self._verdict = pid, beats, stacks, heard, verdict
        self._signal_number = signal_number
        self._say_after_s, self._kill_after_s = say_after_s, kill_after_s
        self._silent_s = self._late_s = 0.0
        self._loop_thread = 0
        self._own_signals = self._its_signals = 0
        self._described = self._answered = False  # since the last heartbeat

    def note_signal(self) -> None:
        """Count a signal to this process: a terminal sends it to both."""
        self._own_signals += 1

    def run(self) -> None:
        """Watch until the process ends or closes its end of the pipe."""
        before = time.monotonic()
        while os.getppid() == self._pid:
            ready, _, _ = select.select([self._beats, self._heard], [], [], _LOOK_S)
            now = time.monotonic()
            # limited: this process may have been stopped together with the other
            self._silent_s += min(now - before, 2 * _LOOK_S)
            before = now
            if self._heard in ready:
                self._its_signals += _read(self._heard).count(b"most recent call first")
            if self._beats in ready:
                beats = _read(self._beats)
                if not beats:
                    return
                self._silent_s, self._described, self._answered = 0.0, False, False
                late, thread = beats.splitlines()[-1].split()
                self._late_s, self._loop_thread = float(late), int(thread)
            elif self._silent_s >= _LOOK_S and self._is_stopped():
                self._silent_s = 0.0
            if self._judge():
                return

    def _judge(self) -> bool:
        """Print a warning, or kill the process, after the time without a heartbeat; returns whether it was killed."""
        signals = max(self._own_signals, self._its_signals)
        deaf = self._silent_s >= _DEAF_AFTER_S
        limit_s = self._kill_after_s
        if limit_s and self._silent_s >= limit_s:
            self._end(f"killed after {limit_s:g} s: {self._describe()}")
        elif limit_s and self._late_s >= limit_s:
            self._end(f"killed: its event loop was blocked for {self._late_s:.0f} s{self._place_of_loop()}")
        elif not limit_s and deaf and signals >= 2:
            _say(f"{self._describe()}: killed, because it could not handle the second Ctrl-C either.")
            self._end()
        else:
            unheard = deaf and signals > 0 and not limit_s
            if not self._described and (self._silent_s >= self._say_after_s or unheard):
                self._described = True
                _say(f"{self._describe()}; {_KILLED % limit_s if limit_s else _NOT_KILLED}")
            if unheard and not self._answered:
                self._answered = True
                time.sleep(_HANDLER_S)  # a signal that arrives while faulthandler re-registers itself is not reported
                _say("The process cannot handle Ctrl-C now: press it once more to kill the process and its children.")
            return False
        return True

    def _end(self, reason: str = "") -> None:
        """Kill the process and its descendants."""
        if self._verdict >= 0:
            from multiprocessing.connection import Connection

            with suppress(OSError):
                Connection(self._verdict).send(reason)
        for pid in (self._pid, *_descendants(self._pid)):
            with suppress(ProcessLookupError, PermissionError):
                if pid != os.getpid():
                    os.kill(pid, signal.SIGKILL)

    # -- where it is stuck --------------------------------------------------------------------------------------------

    def _describe(self) -> str:
        busy, others = self._threads()
        for thread in busy[:1]:
            stack = self._stack_of(thread)
            place = _place(stack) or "native code without a Python frame"
            return f"{_STUCK}: {place} holds the interpreter lock"
        # a call that waits while it holds the lock uses no CPU time
        stacks = (self._stack_of(thread) for thread in others[:_MOST_THREADS])
        places = [_place(stack) for stack in stacks if users_frame(stack)]
        among = f" ({', '.join(places[:3])}{' …' if len(places) > 3 else ''})" if places else ""
        return f"{_STUCK}: a call{among} waits and holds the interpreter lock, or the machine is short of memory"

    def _place_of_loop(self) -> str:
        place = _place(self._stack_of(self._loop_thread))
        return f" in {place}" if place else ""

    def _threads(self) -> tuple[list[int], list[int]]:
        """The ids of the threads that use the CPU now, busiest first, and of the others."""
        before = _running_s(self._pid)
        time.sleep(_SAMPLE_S)
        spent = {thread: now - before.get(thread, now) for thread, now in _running_s(self._pid).items()}
        ranked = sorted(spent, key=lambda thread: -spent[thread])
        busy = [thread for thread in ranked if spent[thread] >= _SAMPLE_S / 2]
        return busy, ranked[len(busy) :]

    def _stack_of(self, thread: int) -> list[Frame]:
        """The stack that a thread writes at a signal, innermost frame first; empty if it has none."""
        if not self._signal_number:
            return []
        if select.select([self._stacks], [], [], 0.0)[0]:
            _read(self._stacks)  # an earlier stack that came too late
        if not _send(self._pid, thread, self._signal_number):
            return []
        text, wait_s = b"", _DUMP_S
        while select.select([self._stacks], [], [], wait_s)[0] and (more := _read(self._stacks)):
            text, wait_s = text + more, 0.05
        return [Frame(path, int(line), name) for path, line, name in _FRAME.findall(text.decode(errors="replace"))]

    def _is_stopped(self) -> bool:
        """Whether the process is stopped, by Ctrl-Z or a debugger."""
        fields = _stat(f"/proc/{self._pid}/stat")
        return bool(fields) and fields[0] in ("T", "t")


def _place(stack: Sequence[Frame]) -> str:
    """The innermost frame of users' code, else the innermost frame, and its rollout."""
    frame, rollout = users_frame(stack) or next(iter(stack), None), rollout_in(stack)
    if frame is None:
        return ""
    return f"{frame.function}(){f' of rollout {rollout}' if rollout else ''} at {frame.path}:{frame.line}"


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))


def _read(descriptor: int) -> bytes:
    return os.read(descriptor, 65_536)


def _stat(path: str) -> list[str]:
    """The fields of a ``stat`` file after the process name; none without such a file, as on macOS."""
    try:
        return Path(path).read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _running_s(pid: int) -> dict[int, float]:
    """Seconds that each thread has run or waited for a core."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return {}
    spent: dict[int, float] = {}
    for thread in threads:
        with suppress(OSError):
            on_core, waited, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
            spent[int(thread)] = (int(on_core) + int(waited)) / 1e9
    return spent


def _descendants(pid: int) -> list[int]:
    try:
        parents = {int(name): _stat(f"/proc/{name}/stat") for name in os.listdir("/proc") if name.isdigit()}
    except OSError:
        return []
    family = [pid]
    for parent in family:
        family += [child for child, fields in parents.items() if fields and int(fields[1]) == parent]
    return family[1:]


def _send(pid: int, thread: int, number: int) -> bool:
    """Send a signal to one thread."""
    import ctypes

    send: Callable[..., int] | None = getattr(ctypes.CDLL(None), "tgkill", None)
    return send is not None and send(pid, thread, number) == 0


def main(arguments: Sequence[str]) -> None:
    """Arguments: PID BEATS STACKS HEARD VERDICT SIGNAL SAY_AFTER_S KILL_AFTER_S; descriptors, -1 for no verdict."""
    pid, beats, stacks, heard, verdict, number = map(int, arguments[:6])
    watcher = Watcher(
        pid=pid,
        beats=beats,
        stacks=stacks,
        heard=heard,
        verdict=verdict,
        signal_number=number,
        say_after_s=float(arguments[6]),
        kill_after_s=float(arguments[7]),
    )
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda *_: watcher.note_signal())
    watcher.run()


if __name__ == "__main__":
    main(sys.argv[1:])
