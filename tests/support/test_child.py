"""Child processes, the Supervisor that starts ended ones again, and the child that watches its parent."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from agl_slime.errors import EngineError
from agl_slime.support.child import Child, ServerChild, Supervisor
from agl_slime.support.watch import Frame, users_frame
from tests.harness.processes import is_running
from tests.harness.waiting import becomes_true


def child_of(program: str, **options: Any) -> Child:
    return Child([sys.executable, "-c", program], name="the child", env=os.environ, **options)


def test_child_log_has_all_runs_and_its_tail_only_the_last(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for word in ("first", "second"):
        with child_of(f"import sys; print({word!r}); sys.exit(3)", log=log) as child:
            assert child.wait() == 3
            assert child.output_tail() == f"{word} (all of them: {log})"
        assert child.output_tail() == "none"
    assert log.read_text() == "first\nsecond\n"


def test_stopped_child_takes_its_own_children_along(tmp_path: Path) -> None:
    program = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '100']).pid, flush=True); time.sleep(100)"
    child = child_of(program, log=tmp_path / "log").start()
    assert becomes_true(lambda: (tmp_path / "log").read_text().endswith("\n"), 20)
    inner = int((tmp_path / "log").read_text())
    assert child.wait(0.0) is None
    child.stop(0.0)
    assert becomes_true(lambda: not is_running(inner), 5)
    with pytest.raises(EngineError, match="the child was stopped"):
        child.start()


@pytest.mark.parametrize(
    ("exit_with", "ending"),
    [
        ("sys.exit(3)", "exit code 3"),
        ("os.kill(os.getpid(), 9)", "killed by signal 9, most often for memory"),
        ("os.kill(os.getpid(), 15)", "killed by signal 15"),
        ("sys.exit(137)", "killed by signal 9, most often for memory"),  # as a shell says it
        ("sys.exit(255)", "exit code 255"),
    ],
)
def test_ending_names_signal_memory_and_output(exit_with: str, ending: str) -> None:
    with child_of(f"import os, sys; print('so long', flush=True); {exit_with}") as child:
        child.wait(20)
        assert child.ending() == f"{ending}; last output: so long"


def test_a_server_that_prints_something_else_is_an_error() -> None:
    server = ServerChild(
        [sys.executable, "-c", "print('hello')"], name="the server", served="m", start_timeout_s=20, env=os.environ
    )
    with pytest.raises(EngineError, match="the server for m printed 'hello' where its address was expected"):
        server.start()


class Scripted:
    """Children without processes: each ends with the next reason that is put into its queue."""

    def __init__(self, restarts: int, *, launch: Callable[[int], None] = lambda _: None, **options: Any) -> None:
        self.ends: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.launched, self.killed = 0, 0
        self.reasons: list[str] = []
        self.lost: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._on_launch = launch
        self.supervisor = Supervisor(
            launch=self._launch,
            follow=self._follow,
            on_lost=lambda reason: self.lost.put((reason, self.supervisor.supervised)),
            kill=self.kill,
            restarts=restarts,
            **options,
        )

    def _launch(self) -> tuple[str, int]:
        self.launched += 1
        self._on_launch(self.launched)
        return str(self.launched), self.launched

    def _follow(self, name: str, child: int) -> str:
        self.reasons.append(self.ends.get(timeout=10))
        return self.reasons[-1]

    def kill(self, child: int) -> None:
        self.killed += 1
        self.ends.put("killed")

    def expect_lost(self, reason: str, supervised: int) -> None:
        assert self.lost.get(timeout=10) == (reason, supervised)


@contextmanager
def scripted(restarts: int, count: int = 1, **options: Any) -> Iterator[Scripted]:
    children = Scripted(restarts, **options)
    children.supervisor.start(count)
    yield children
    children.supervisor.stop()
    for child in children.supervisor.unended_after(0.0):
        children.kill(child)
    children.supervisor.join(10)
    assert not children.supervisor.running


def test_restarts_are_shared_and_the_last_child_is_reported() -> None:
    with scripted(1, count=2) as children:
        children.ends.put("a")
        assert becomes_true(lambda: children.launched == 3, 10)
        for reason, supervised in (("b", 1), ("c", 0)):
            children.ends.put(reason)
            children.expect_lost(reason, supervised)
        assert (children.launched, children.supervisor.restarts) == (3, 1)
        assert children.reasons == ["a", "b", "c"]
    assert children.lost.empty()


def test_restored_restarts_count_from_zero_and_a_finished_child_ends() -> None:
    with scripted(1) as children:
        for launched in (2, 3, 4):
            children.ends.put("died")
            assert becomes_true(lambda launched=launched: children.launched == launched, 10)
            children.supervisor.restore_restarts()
        assert children.lost.empty()
        children.ends.put("")
        children.expect_lost("", 0)
        assert children.launched == 4


def test_stop_ends_a_pause_and_starts_nothing() -> None:
    with scripted(5, pause_s=lambda number: 1000.0 * number) as children:
        children.ends.put("died")
        assert becomes_true(lambda: children.supervisor.restarts == 1, 10)
        assert children.supervisor.running
        children.supervisor.stop()
        children.expect_lost("died", 0)
    assert children.launched == 1


def test_child_launched_during_a_stop_is_killed() -> None:
    launching, stopped = threading.Event(), threading.Event()

    def launch(number: int) -> None:
        if number == 2:
            launching.set()
            assert stopped.wait(10)

    with scripted(5, launch=launch) as children:
        children.ends.put("died")
        assert launching.wait(10)
        children.supervisor.stop()
        stopped.set()
        children.expect_lost("killed", 0)
    assert (children.launched, children.killed) == (2, 1)


def test_restart_that_fails_is_the_failure_and_ends_the_child(caplog: pytest.LogCaptureFixture) -> None:
    def launch(number: int) -> None:
        if number == 2:
            raise EngineError("no more processes")

    with scripted(5, launch=launch) as children:
        children.ends.put("died")
        children.expect_lost("died", 0)
        assert str(children.supervisor.failure) == "no more processes"
        assert children.supervisor.wait_ready(0.0), "a failure is waited for like a readiness"
    assert "no longer supervised" in caplog.text


WITHIN_S = 60.0  # for steps that take moments on an idle machine

SCRIPT = """
import asyncio, ctypes, re, signal, sys, threading
from agl_slime.runner.base import RunnerSettings
from agl_slime.runner.lag import LagMonitor
from agl_slime.support.watch import named_for
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
        monitor.extend_limit({limit_s})
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    threading.Thread(target=named_for(lambda: {work}(), "ro-7"), daemon=True).start()
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
