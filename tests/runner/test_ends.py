"""The end of a runner thread whose agents do not end, and the agent that is named for it."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from agl_slime.runner.thread import RunnerThread
from agl_slime.store.bridge import BridgeStore
from agl_slime.support import threads
from agl_slime.support.agl import LitAgent
from tests.harness.stores import enqueue_inputs
from tests.runner.function_agents import RESOURCES, quick, reason_of


class StubbornAgent(LitAgent[Any]):
    """Ignores its cancellation, and blocks nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        self.begun.set()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass


class BlockingAgent(LitAgent[Any]):
    def __init__(self) -> None:
        super().__init__()
        self.begun, self.released = threading.Event(), threading.Event()

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        self.begun.set()
        self.released.wait(60)
        return 1.0


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("agl_slime.runner.guard._CANCEL_GRACE_S", 0.2)
    monkeypatch.setattr(threads, "_CANCEL_S", 0.2)
    caplog.set_level(logging.WARNING, "agl_slime")


async def started(agent: Any, store: BridgeStore | None = None) -> RunnerThread:
    store = store or BridgeStore()
    await store.add_resources(RESOURCES)
    await enqueue_inputs(store, [1])
    runner = RunnerThread(agent=agent, store=store, settings=quick(lag_warning_s=0)).start()
    assert await asyncio.to_thread(agent.begun.wait, 20)
    return runner


async def test_an_agent_that_ignores_its_cancellation_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    runner = await started(StubbornAgent(), store := BridgeStore())
    assert not await asyncio.to_thread(runner.stop, cancel=False, timeout_s=0.2)
    assert "its rollouts have not ended" in caplog.text
    caplog.clear()
    assert await asyncio.to_thread(runner.stop, timeout_s=30)
    [rollout] = await store.query_rollouts()
    assert (rollout.status, (await reason_of(store, rollout))[0]) == ("failed", "cancelled")
    [warning] = [message for message in caplog.messages if "cancellation" in message]
    assert f"StubbornAgent.rollout_async at {__file__}:" in warning
    assert "blocks" not in caplog.text


async def test_an_agent_that_blocks_the_end_is_named(caplog: pytest.LogCaptureFixture) -> None:
    agent = BlockingAgent()
    runner = await started(agent)
    assert not await asyncio.to_thread(runner.stop, timeout_s=0.2)
    agent.released.set()
    assert f"BlockingAgent.rollout_async at {__file__}:" in caplog.text
    assert "blocks its event loop" in caplog.text
    assert await asyncio.to_thread(runner.stop, timeout_s=30)
