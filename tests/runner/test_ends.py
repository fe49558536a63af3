"""The end of a runner thread whose agents do not end, and who is named for it."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import pytest

from agl_slime.runner.base import RunnerSettings
from agl_slime.runner.thread import RunnerThread
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import EnqueueRolloutRequest, LitAgent
from tests.runner.function_agents import RESOURCES, reason_of


class StubbornAgent(LitAgent[Any]):
    """Goes on whatever happens: it ignores its cancellation, and blocks nothing."""

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


async def started(agent: Any, store: BridgeStore | None = None) -> RunnerThread:
    store = store or BridgeStore()
    await store.add_resources(RESOURCES)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1, mode="train")])
    settings = RunnerSettings(poll_interval_s=0.01, heartbeat_interval_s=0, lag_warning_s=0)
    runner = RunnerThread(agent=agent, store=store, settings=settings).start()
    assert await asyncio.to_thread(agent.begun.wait, 20)
    return runner


async def test_an_agent_that_ignores_its_cancellation_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    runner = await started(StubbornAgent(), store := BridgeStore())
    with caplog.at_level(logging.WARNING, "agl_slime"):
        assert await asyncio.to_thread(runner.stop, timeout_s=30)
    [rollout] = await store.query_rollouts()
    assert (rollout.status, (await reason_of(store, rollout))[0]) == ("failed", "cancelled")
    [said] = [record.getMessage() for record in caplog.records if "cancellation" in record.getMessage()]
    assert f"StubbornAgent.rollout_async at {__file__}:" in said
    assert "blocks" not in caplog.text


async def test_thread_that_waits_for_its_rollouts_names_no_blocking_agent(caplog: pytest.LogCaptureFixture) -> None:
    runner = await started(StubbornAgent())
    with caplog.at_level(logging.WARNING, "agl_slime"):
        assert not await asyncio.to_thread(runner.stop, cancel=False, timeout_s=0.2)
        assert "its rollouts have not ended" in caplog.text
        assert "blocks" not in caplog.text
        assert await asyncio.to_thread(runner.stop, timeout_s=30)


async def test_an_agent_that_blocks_the_end_is_named(caplog: pytest.LogCaptureFixture) -> None:
    agent = BlockingAgent()
    runner = await started(agent)
    with caplog.at_level(logging.WARNING, "agl_slime"):
        assert not await asyncio.to_thread(runner.stop, timeout_s=0.2)
    agent.released.set()
    assert f"BlockingAgent.rollout_async at {__file__}:" in caplog.text
    assert "blocks its event loop" in caplog.text
    assert await asyncio.to_thread(runner.stop, timeout_s=30)
