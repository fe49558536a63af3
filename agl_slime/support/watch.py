"""Functions on stacks, and the program of a child process that watches its parent.

Code that holds Python's interpreter lock (GIL), such as a regular expression that backtracks, stops every thread, time
limit and signal handler of its process. The child counts the seconds since the last heartbeat, has the stuck thread
write its stack (``faulthandler``, which needs no lock), prints its place, and kills the process at its limit.
``agl_slime.runner.lag`` starts it by path, without ``site``: it imports only the standard library.
"""

from __future__ import annotations

import math
import os
import re
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

# A thread that gets this signal writes its stack. Real-time signals from the end of their range are rarely used.
STACK_SIGNAL: int = getattr(signal, "SIGRTMAX", 0) and signal.SIGRTMAX - 3
_ROLLOUT = "rollout "  # begins the names of functions that call the code of a rollout; its id follows
_PACKAGE = str(Path(__file__).resolve().parents[1])
_LIBRARY = str(Path(os.__file__).parent)
_CHECK_S = 0.5
_DUMP_S = 1.0  # limit for writing a stack, which takes milliseconds
_SAMPLE_S = 0.2  # for measuring the CPU time of threads
_MOST_THREADS = 64
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


class Frame(NamedTuple):
    path: str
    line: int
    function: str


def named_for(function: F, rollout_id: str) -> F:
    """A copy of ``function`` whose name has the rollout's id: names are all that another process sees of a stack."""
    assert isinstance(function, FunctionType)
    name = f"{_ROLLOUT}{rollout_id}"
    code = function.__code__.replace(co_name=name, co_qualname=name)
    copy: Any = FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
    return copy


def call_named(rollout_id: str, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """The result of a call of a rollout's code, or of no rollout's."""
    return (named_for(_call, rollout_id) if rollout_id else _call)(call, *args, **kwargs)


def _call(call: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    return call(*args, **kwargs)


def stack_of(frame: FrameType) -> list[Frame]:
    """The frames of a stack, innermost first."""
    entries = traceback.walk_stack(frame)
    return [Frame(entry.f_code.co_filename, line or 0, entry.f_code.co_qualname) for entry, line in entries]


def users_frame(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame of users' code, which is neither this package's, the standard library's nor an installed
    package's. ``stack`` is innermost first. ``None`` if there is none, or while a module is imported."""
    if any(frame.path.startswith("<frozen importlib") for frame in stack):
        return None
    return next((frame for frame in stack if _is_users(frame)), None)


def _is_users(frame: Frame) -> bool:
    path = frame.path
    if path.startswith(("<", _PACKAGE + os.sep)) or frame.function.startswith(_ROLLOUT):
        return False
    return not (path.startswith(_LIBRARY + os.sep) or re.search(r"[/\\](site|dist)-packages[/\\]", path))


def rollout_in(stack: Sequence[Frame]) -> str:
    """The id of the rollout whose code a stack runs, or an empty string."""
    names = (frame.function for frame in stack)
    return next((name.removeprefix(_ROLLOUT) for name in names if name.startswith(_ROLLOUT)), "")


def place_of(stack: Sequence[Frame]) -> str:
    """The innermost frame of users' code, else the innermost frame, with its rollout."""
    frame, rollout = users_frame(stack) or next(iter(stack), Frame("?", 0, "?")), rollout_in(stack)
    return f"{frame.function}(){rollout and f' of rollout {rollout}'} at {frame.path}:{frame.line}"


def kill(pid: int, reason_fd: int, reason: str, rollout: str, advice: str) -> None:
    """Kill a process. The ``multiprocessing`` connection with the descriptor ``reason_fd`` gets the reason and the
    rollout that caused it; without one (-1) standard error gets the reason and the advice."""
    if reason_fd >= 0:
        from multiprocessing.connection import Connection

        with suppress(OSError):
            Connection(reason_fd).send((f"killed {reason}", rollout))
    else:
        _print(f"error: killed {reason}; {advice}")
    os.kill(pid, signal.SIGKILL)


def _print(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))


# -- in the child ----------------------------------------------------------------------------------------------------


def _watch(pid: int, reason_fd: int, name_after_s: float, advice: str) -> None:
    """Watch the process until it ends. Its heartbeats, each with the limit, and its stacks come by standard input."""
    silent_s, limit_s, printed = 0.0, math.inf, False
    # None until the first heartbeat, before which the process has no handler: a signal for a stack would end it
    wait_s: float | None = None
    while os.getppid() == pid:
        if beats := re.findall(r"^beat (\S+)$", _read(wait_s), re.MULTILINE):
            silent_s, limit_s, printed, wait_s = 0.0, float(beats[-1]), False, _CHECK_S
        elif not _is_stopped(pid):  # not by the clock: this process may have been stopped together with it
            silent_s += _CHECK_S
        if silent_s >= limit_s:
            holder, rollout = _holder(pid)
            kill(pid, reason_fd, f"after {limit_s:g} s: {holder}", rollout, advice)
            return
        if not printed and silent_s >= name_after_s:
            printed = True
            end = f"it is killed after {limit_s:g} s; " if limit_s < math.inf else ""
            _print(f"No Python code runs now: {_holder(pid)[0]}; {end}Ctrl-\\ ends it at once; {advice}")


def _holder(pid: int) -> tuple[str, str]:
    """The holder of the lock, and the id of its rollout."""
    first = _running_s(pid)
    time.sleep(_SAMPLE_S)
    spent = {thread: second - first.get(thread, second) for thread, second in _running_s(pid).items()}
    ranked = sorted(spent, key=lambda thread: -spent[thread])[:_MOST_THREADS]
    busy = [thread for thread in ranked if spent[thread] >= _SAMPLE_S / 2]
    stacks = [stack for thread in busy or ranked if (stack := _stack_in(pid, thread))]
    users = [stack for stack in stacks if users_frame(stack)]
    # the busiest, or, since a call that waits while it holds the lock uses no CPU time, each that may be the one
    holders = (users or stacks)[:1] if busy else users
    places = " or ".join(map(place_of, holders[:3])) or "native code"
    rest, waits = " or another" * (len(holders) > 3), " and waits, or the machine is short of memory" * (not busy)
    return f"{places}{rest} holds the interpreter lock{waits}", rollout_in(holders[0]) if len(holders) == 1 else ""


def _stack_in(pid: int, thread: int) -> list[Frame]:
    """The stack that a thread writes at a signal, innermost frame first; empty if it has none."""
    import ctypes

    send: Callable[..., int] = getattr(ctypes.CDLL(None), "tgkill", lambda *_: -1)
    text = _read(0.0) and ""  # an earlier stack may have come too late
    wait_s = _DUMP_S if send(pid, thread, STACK_SIGNAL) == 0 else 0.0
    while chunk := _read(wait_s):
        text, wait_s = text + chunk, 0.05
    return [Frame(path, int(line), name) for path, line, name in _FRAME.findall(text)]


def _read(wait_s: float | None) -> str:
    """Input that comes within ``wait_s``; ends this process at the end of the other."""
    if not select.select([0], [], [], wait_s)[0]:
        return ""
    return os.read(0, 65_536).decode(errors="replace") or sys.exit()


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, by Ctrl-Z or a debugger; unknown without /proc, as on macOS."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _running_s(pid: int) -> dict[int, float]:
    """Seconds that each thread has run or waited for a core."""
    spent: dict[int, float] = {}
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            on_core, waited, _ = (thread / "schedstat").read_text().split()
            spent[int(thread.name)] = (int(on_core) + int(waited)) / 1e9
    return spent


if __name__ == "__main__":
    _watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4])
