"""The lag monitor of the concurrent runner: the code that is named when its event loop is blocked."""

import asyncio
import importlib.machinery
import itertools
import logging
import re
import selectors
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_slime.runner import lag
from agl_slime.runner.base import RunnerSettings
from agl_slime.support.agl import LitAgent
from agl_slime.support.watch import Frame
from tests.harness.waiting import becomes_true, until
from tests.runner.function_agents import FnAgent, finished, running


@pytest.fixture(autouse=True)
def short_ticks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    monkeypatch.setattr(lag, "_TICK_S", 0.02)
    with caplog.at_level(logging.WARNING, "agl_slime.runner.lag"):
        yield


class BlockingAgent(LitAgent[Any]):
    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        time.sleep(0.5)  # noqa: ASYNC251  the monitor is to name this line
        return 1.0


async def test_an_agent_that_blocks_the_loop_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async with running(BlockingAgent(), lag_warning_s=0.1) as store:
        await finished(store, range(2))
    [record] = [record for record in caplog.records if record.name == "agl_slime.runner.lag"]
    place = r"BlockingAgent.rollout_async\(\) of rollout ro-\w+ at \S+test_lag.py:\d+ blocks the runner's event loop"
    assert re.match(place, record.getMessage())


class LateSelector(selectors.DefaultSelector):
    """A busy machine: the loop wakes up long after its timeout."""

    def select(self, timeout: float | None = None) -> Any:
        time.sleep(0.15)
        return super().select(0)


def test_late_wakeup_of_the_event_loop_is_not_blamed_on_an_agent() -> None:
    monitor = lag.LagMonitor(RunnerSettings(lag_warning_s=0.05, stuck_after_s=0))

    async def wait() -> None:
        monitor.start()
        for _ in range(4):
            await asyncio.sleep(0.01)
        monitor.stop()

    loop = asyncio.SelectorEventLoop(LateSelector())
    try:
        loop.run_until_complete(wait())
    finally:
        loop.close()
    assert monitor.warning is None


@pytest.mark.parametrize("computes", [False, True])
async def test_code_that_hardly_gets_to_run_is_not_blamed(monkeypatch: pytest.MonkeyPatch, computes: bool) -> None:
    """On a busy machine a callback takes wall-clock time without CPU time."""
    places = iter(range(10**9))
    looked = threading.Event()

    def stack_of(frame: Any) -> list[Frame]:
        n = next(places)
        if n == 5:
            looked.set()
        return [Frame("agent.py", n, "work"), Frame("events.py", 1, "Handle._run")]  # each time at another line

    monkeypatch.setattr(lag, "stack_of", stack_of)
    monitor = lag.LagMonitor(RunnerSettings(lag_warning_s=0.05, stuck_after_s=0))
    spent = itertools.count()
    monkeypatch.setattr(monitor, "_cpu_s", lambda: float(next(spent)) if computes else 0.0)
    monitor.start()
    # on the loop: a thread would not block it
    assert becomes_true(lambda: looked.is_set() or monitor.warning is not None, 20.0)
    monitor.stop()
    assert (monitor.warning is not None) == computes
    assert looked.is_set() != computes


class SlowImport:
    """A slow import: a module's code, run by Python's importer."""

    def find_spec(self, name: str, *_: Any) -> Any:
        return importlib.machinery.ModuleSpec(name, self) if name == "a_slow_module" else None  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> None: ...

    def exec_module(self, module: Any) -> None:
        time.sleep(0.4)


def package_blocks() -> Any:
    """An agent of which every line is the package's."""
    source = (
        "import time\nclass Agent(LitAgent):\n  async def rollout_async(self, *_):\n    time.sleep(0.4); return 1.0\n"
    )
    space: dict[str, Any] = {"LitAgent": LitAgent, "__name__": "made"}
    exec(compile(source, str(Path(lag.__file__).parents[1] / "tokens" / "template.py"), "exec"), space)
    return space["Agent"]()


async def imports(task: Any) -> float:
    import a_slow_module  # type: ignore[import-not-found]  # noqa: F401

    return 1.0


@pytest.mark.parametrize("agent", [package_blocks(), FnAgent(imports)], ids=["package", "import"])
async def test_imports_and_other_threads_are_not_blamed_on_the_agent(agent, caplog, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [SlowImport(), *sys.meta_path])
    looked = threading.Event()
    look = lag.users_frame

    def users_frame(stack: Any) -> Any:
        looked.set()
        return look(stack)

    monkeypatch.setattr(lag, "users_frame", users_frame)
    async with running(agent, lag_warning_s=0.1) as store:
        await finished(store, [0])
    assert looked.is_set()
    assert not caplog.records


async def test_agents_that_wait_properly_raise_no_such_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with running(FnAgent(lambda _: asyncio.sleep(0.6, 1.0)), lag_warning_s=0.3) as store:
        await finished(store, range(2))
    assert not caplog.records


async def test_one_child_watches_a_process_while_a_monitor_runs() -> None:
    first, second = (lag.LagMonitor(RunnerSettings(lag_warning_s=0)) for _ in range(2))
    first.start()
    second.start()
    watching = first._child
    assert watching is not None
    assert second._child is None
    first.stop()
    assert watching.returncode is not None
    await until(lambda: second._child is not None)
    second.stop()
    first.start()  # a runner may run again
    assert first._child is not None
    assert first._child.poll() is None
    assert first._thread.is_alive()
    first.stop()
    assert "agl-slime-lag-monitor" not in {thread.name for thread in threading.enumerate()}


async def test_a_warning_that_is_under_way_comes_before_the_end_of_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = lag.LagMonitor(RunnerSettings(lag_warning_s=0.01, stuck_after_s=0))
    checking, checked = threading.Event(), threading.Event()

    def check(late_s: float) -> None:
        checking.set()
        assert monitor._stopped.wait(20)
        checked.set()

    monkeypatch.setattr(monitor, "_check", check)
    monitor.start()
    assert checking.wait(20)  # on the loop, which is late by that
    monitor.stop()
    assert checked.is_set()
