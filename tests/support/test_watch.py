"""The watch over a process in which code holds the interpreter lock: real processes, a regular expression that
backtracks for ever, real signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from agl_slime.support.watcher import Frame, users_frame
from tests.harness.waiting import becomes_true

WITHIN_S = 60.0  # for steps that take moments on an idle machine

SCRIPT = """
import re, signal, sys, threading, time
from agl_slime.support.watch import Watch, named

def score(text):
    return re.match(r"(a+)+$", text)

def waits():
    import ctypes
    ctypes.PyDLL(None).sleep(100)

def beat():
    while True:
        watch.beat(late_s=LATE, loop_thread=threading.get_native_id())
        time.sleep(0.1)

LATE = {late}
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: print("heard", flush=True))
watch = Watch({settings})
threading.Thread(target=beat, daemon=True).start()
while watch._child is None:
    time.sleep(0.01)
if {child}:
    import subprocess
    subprocess.Popen(["sleep", "1000"])
print("ready", flush=True)
if sys.stdin.readline() == "go\\n":
    threading.Thread(target=named(lambda: {work}, "ro-7"), daemon=True).start()
while True:
    time.sleep(0.1)
"""


class Watched:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout is not None
        assert process.stdin is not None
        self.out, self.into = process.stdout, process.stdin

    def go(self) -> None:
        self.into.write("go\n")
        self.into.flush()

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


@contextmanager
def watched(directory: Path, work: str, settings: str, *, late: float = 0.0, child: bool = False) -> Iterator[Watched]:
    script = directory / "agent.py"
    script.write_text(SCRIPT.format(work=work, settings=settings, late=late, child=child))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen([sys.executable, str(script)], text=True, start_new_session=True, **pipes)  # type: ignore[call-overload]
    try:
        case = Watched(process)
        assert case.out.readline() == "ready\n"
        yield case
    finally:
        if process.poll() is None:
            for each in psutil.Process(process.pid).children(recursive=True):
                each.kill()
            process.kill()
        process.wait(10)
        process.communicate()


def place_of(directory: Path, text: str) -> str:
    lines = (directory / "agent.py").read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if text in line)
    return f"of rollout ro-7 at {directory / 'agent.py'}:{number}"


STUCK = "score('a' * 40 + 'b')"


def test_a_call_that_waits_under_the_lock_is_named(tmp_path: Path) -> None:
    with watched(tmp_path, "waits()", "say_after_s=2.0") as case:
        case.go()
        assert f"waits() {place_of(tmp_path, 'PyDLL')}" in case.out.readline()


def test_code_that_holds_the_lock_is_named_once(tmp_path: Path) -> None:
    with watched(tmp_path, STUCK, "say_after_s=1.0, signals=True") as case:
        case.go()
        text = case.out.readline()
        assert f"score() {place_of(tmp_path, 're.match')} holds the interpreter lock" in text
        assert "--runners process:N" in text
        case.process.send_signal(signal.SIGINT)
        assert "press it once more" in case.out.readline()
        case.process.send_signal(signal.SIGINT)
        assert case.process.wait(WITHIN_S) == -signal.SIGKILL
        [last] = case.out.read().splitlines()  # the first signal has not been handled
        assert "second Ctrl-C" in last


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)], ids=str)
def test_a_second_signal_ends_a_process_that_hears_none(number: signal.Signals, tmp_path: Path) -> None:
    with watched(tmp_path, STUCK, "say_after_s=1e9, signals=True", child=True) as case:
        case.go()
        children = case.children()
        assert len(children) == 2
        busy = psutil.Process(case.process.pid)
        began = busy.cpu_times().user
        assert becomes_true(lambda: busy.cpu_times().user - began >= 0.3, WITHIN_S)  # until the expression runs
        case.process.send_signal(number)
        assert "score() of rollout ro-7" in case.out.readline()  # at once: the process cannot handle the signal
        assert "press it once more" in case.out.readline()
        case.process.send_signal(number)
        assert case.process.wait(WITHIN_S) == -signal.SIGKILL
        _, alive = psutil.wait_procs(children, timeout=WITHIN_S)
        assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []
        assert "heard" not in case.out.read().splitlines()


def test_a_process_that_hears_signals_is_left_alone(tmp_path: Path) -> None:
    with watched(tmp_path, "None", "say_after_s=1e9, signals=True") as case:
        for _ in range(3):
            case.process.send_signal(signal.SIGINT)
            assert case.out.readline() == "heard\n"
        [child] = case.children()
        case.process.kill()
        case.process.wait(10)
        assert case.out.read() == ""  # at its end, which is the child's as well
        _, alive = psutil.wait_procs([child], timeout=WITHIN_S)
        assert alive == []


@pytest.mark.slow
def test_a_process_that_is_stopped_is_not_stuck(tmp_path: Path) -> None:
    with watched(tmp_path, "None", "say_after_s=0.5, kill_after_s=1.0") as case:
        case.go()  # blocked in a read, the main thread would not notice a signal to another thread
        [child] = case.children()
        os.kill(case.process.pid, signal.SIGSTOP)
        began = child.num_ctx_switches().voluntary
        assert becomes_true(lambda: child.num_ctx_switches().voluntary - began >= 8, WITHIN_S)  # half a second each
        os.kill(case.process.pid, signal.SIGCONT)
        case.process.send_signal(signal.SIGINT)
        assert case.out.readline() == "heard\n"


@pytest.mark.parametrize(("work", "late"), [(STUCK, 0.0), ("None", 3.0)], ids=["held lock", "stalled loop"])
def test_a_worker_that_is_stuck_is_killed(work: str, late: float, tmp_path: Path) -> None:
    with watched(tmp_path, work, "say_after_s=1e9, kill_after_s=1.5", late=late) as case:
        if not late:
            case.go()
        assert case.process.wait(WITHIN_S) == -signal.SIGKILL


def test_stack_readers_agree_on_frames_of_user_code() -> None:
    ours, library = Frame(re.__file__, 1, "match"), Frame(pytest.__file__, 1, "main")
    package = Frame(str(Path(__file__).parents[2] / "agl_slime" / "runner" / "guard.py"), 1, "rollout ro-7")
    users = Frame("/home/user/agent.py", 3, "score")
    assert users_frame([ours, users, package]) == users
    assert users_frame([library, package]) is None
    assert users_frame([ours, users, Frame("<frozen importlib._bootstrap>", 1, "_call"), users, package]) is None
