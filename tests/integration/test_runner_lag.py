"""The lag monitor of the concurrent runner: who is named when its event loop is blocked."""

from __future__ import annotations

import asyncio
import itertools
import logging
import selectors
import threading
import time
from typing import Any

import pytest

from agl_slime.runner import lag
from agl_slime.support.agl import LitAgent
from tests.integration.test_runner_concurrent import FnAgent, finished, running


class BlockingAgent(LitAgent[Any]):
    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        time.sleep(0.4)  # noqa: ASYNC251  what the monitor is to find
        return 1.0


async def test_an_agent_that_blocks_the_loop_is_named_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lag, "_TICK_S", 0.05)
    with caplog.at_level(logging.WARNING, "agl_slime.runner.lag"):
        async with running(BlockingAgent(), lag_warning_s=0.1) as store:
            await finished(store, range(2))
    [record] = [record for record in caplog.records if record.name == "agl_slime.runner.lag"]
    assert "BlockingAgent blocks the runner's event loop" in record.getMessage()
    assert "test_runner_lag.py" in record.getMessage()
    assert "(rollout_async)" in record.getMessage()


class LateSelector(selectors.DefaultSelector):
    """What a busy machine does: the loop wakes up long after it wanted to."""

    def select(self, timeout: float | None = None) -> Any:
        time.sleep(0.4)
        return super().select(0)


def test_a_loop_that_the_machine_does_not_wake_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    # fault 30
    monkeypatch.setattr(lag, "_TICK_S", 0.02)
    monitor = lag.LagMonitor(agent_name="Agent", threshold_s=0.05)

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
    """fault 30: on a busy machine a callback takes its time without having used any."""
    monkeypatch.setattr(lag, "_TICK_S", 0.02)
    places = iter(range(10**9))
    looked = threading.Event()

    def place_of(frame: Any) -> str:
        n = next(places)
        if n == 5:
            looked.set()
        return f"agent.py:{n}"  # it gets on, a line at a time

    monkeypatch.setattr(lag, "_place_of", place_of)
    monitor = lag.LagMonitor(agent_name="Agent", threshold_s=0.05)
    spent = itertools.count()
    monkeypatch.setattr(monitor, "_cpu_s", lambda: float(next(spent)) if computes else 0.0)
    monitor.start()
    waited = looked.wait(1.0)  # on the loop: a thread would not block it
    monitor.stop()
    assert (monitor.warning is not None) == computes
    assert waited != computes


async def test_agents_that_wait_properly_raise_no_such_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def work(task: Any) -> float:
        await asyncio.sleep(1.5)
        return 1.0

    with caplog.at_level(logging.WARNING, "agl_slime.runner.lag"):
        async with running(FnAgent(work), lag_warning_s=1.0) as store:
            await finished(store, range(2))
    assert not caplog.records
