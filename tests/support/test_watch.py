"""The watch over a process in which code holds the interpreter lock: real processes, a regular expression that
backtracks for ever, real signals."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from agl_slime.support.watch import Frame, users_frame
from tests.harness.waiting import becomes_true

WITHIN_S = 60.0  # for steps that take moments on an idle machine

SCRIPT = """
import asyncio, ctypes, re, signal, sys, threading
from agl_slime.runner.base import RunnerSettings
from agl_slime.runner.lag import LagMonitor
from agl_slime.support.watch import named
getattr(ctypes.CDLL(None), "prctl", print)(1, signal.SIGKILL)  # Linux: it ends with the test's process
def score():
    re.match(r"(a+)+$", "a" * 40 + "b")

def waits():
    ctypes.PyDLL(None).sleep(100)

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: print("heard", flush=True))
    settings = RunnerSettings(stuck_after_s={stuck_s})
    for monitor in LagMonitor(settings), LagMonitor(settings):
        monitor.start()
        monitor.allow({limit_s})
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    threading.Thread(target=named(lambda: {work}(), "ro-7"), daemon=True).start()
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Watched:
    """A process with two monitors, in which ``work`` begins at ``go``."""

    def __init__(self, directory: Path, work: str, *, stuck_s: float, limit_s: float = 0.0) -> None:
        script = directory / "agent.py"
        script.write_text(SCRIPT.format(work=work, stuck_s=stuck_s, limit_s=limit_s))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        command = [sys.executable, str(script)]
        self.process: Any = subprocess.Popen(command, text=True, bufsize=1, start_new_session=True, **pipes)  # type: ignore[call-overload]

    def __enter__(self) -> Self:
        if (line := self.line()) != "ready\n":
            self.process.kill()
        assert line == "ready\n"
        [self.child] = psutil.Process(self.process.pid).children(recursive=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # its child ends with it
        self.process.communicate()

    def line(self) -> str:
        return self.process.stdout.readline()

    def go(self) -> None:
        self.process.stdin.write("go\n")

    def interrupt(self) -> None:
        """As a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def last_line(self) -> str:
        """The only line that is left, once the process was killed."""
        assert self.process.wait(WITHIN_S) == -signal.SIGKILL
        [last] = self.process.stdout.read().splitlines()
        return last


def test_a_call_that_waits_under_the_lock_is_named(tmp_path: Path) -> None:
    with Watched(tmp_path, "waits", stuck_s=4.0) as case:
        case.go()
        assert f"waits() of rollout ro-7 at {tmp_path}/agent.py:11" in case.line()


def test_code_that_holds_the_lock_is_named_once_and_ended_at_its_limit(tmp_path: Path) -> None:
    with Watched(tmp_path, "score", stuck_s=1.0, limit_s=3.0) as case:
        case.go()
        named, ended = case.line(), case.last_line()
    holder = f": score() of rollout ro-7 at {tmp_path}/agent.py:8 holds the interpreter lock; "
    assert f"{holder}it is killed after 3 s; Ctrl-\\ ends it at once" in named
    assert ended.startswith(f"error: killed after 3 s{holder}")
    for remedy in ("--rollout-timeout", "--resume", "--runners process:N"):
        assert remedy in ended


def test_a_process_that_hears_signals_is_left_alone(tmp_path: Path) -> None:
    with Watched(tmp_path, "score", stuck_s=1e9) as case:
        for _ in range(3):
            case.interrupt()
            assert case.line() == "heard\n"
        case.process.kill()
        assert case.process.stdout.read() == ""  # at its end, which is the child's as well
        _, alive = psutil.wait_procs([case.child], timeout=WITHIN_S)
        assert alive == []


@pytest.mark.slow
def test_a_process_that_is_stopped_is_not_stuck(tmp_path: Path) -> None:
    with Watched(tmp_path, "score", stuck_s=1.0) as case:
        os.kill(case.process.pid, signal.SIGSTOP)
        began = case.child.num_ctx_switches().voluntary  # one each half second
        assert becomes_true(lambda: case.child.num_ctx_switches().voluntary - began >= 8, WITHIN_S)
        os.kill(case.process.pid, signal.SIGCONT)
        case.interrupt()
        assert case.line() == "heard\n"


def test_stack_readers_agree_on_frames_of_user_code() -> None:
    ours, library = Frame(re.__file__, 1, "match"), Frame(pytest.__file__, 1, "main")
    package = Frame(str(Path(__file__).parents[2] / "agl_slime" / "runner" / "guard.py"), 1, "rollout ro-7")
    users = Frame("/home/user/agent.py", 3, "score")
    assert users_frame([ours, users, package]) == users
    assert users_frame([library, package]) is None
    assert users_frame([ours, users, Frame("<frozen importlib._bootstrap>", 1, "_call"), users, package]) is None
