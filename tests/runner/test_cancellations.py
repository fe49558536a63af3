"""A runner that reaches its store over HTTP hears of rollouts that somebody cancels there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agl_slime.runner.concurrent import ConcurrentRunner, RunnerSettings
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import RemoteStore, WorkerStore
from agl_slime.store.feed import FeedPosition
from agl_slime.store.server import StoreService
from agl_slime.support.agl import (
    LightningStore,
    LightningStoreClient,
    LightningStoreServer,
    LitAgent,
)
from tests.harness.stores import enqueue_inputs
from tests.runner.function_agents import RESOURCES, reason_of


class WaitingAgent(LitAgent[Any]):
    """Says when it begins with a task and when it was cancelled; ends when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.said: asyncio.Queue[str] = asyncio.Queue()
        self.let_go = asyncio.Event()
        self.clean_up = asyncio.Event()
        self.clean_up.set()

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        self.said.put_nowait(f"begins {task}")
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            self.said.put_nowait(f"cancelled {task}")
            await self.clean_up.wait()
            self.said.put_nowait(f"cleaned up {task}")
            raise
        return 1.0

    async def says(self, *sentences: str) -> None:
        """These next, in any order."""
        assert sorted([await asyncio.wait_for(self.said.get(), 10) for _ in sentences]) == sorted(sentences)


@asynccontextmanager
async def running(agent: LitAgent[Any], store: LightningStore) -> AsyncIterator[ConcurrentRunner]:
    runner = ConcurrentRunner(settings=RunnerSettings(poll_interval_s=0.01, heartbeat_interval_s=0))
    runner.init(agent)
    runner.init_worker(0, store)
    task = asyncio.create_task(runner.iter())
    try:
        yield runner
    finally:
        runner.stop()
        await asyncio.wait_for(task, 10)
        runner.teardown_worker(0)
        runner.teardown()
        if isinstance(store, LightningStoreClient):
            await store.close()


async def enqueue(store: BridgeStore, *tasks: Any) -> list[str]:
    await store.add_resources({**RESOURCES})
    return await enqueue_inputs(store, tasks)


async def end_of(store: BridgeStore, rollout_id: str) -> Any:
    return await asyncio.wait_for(store.wait_for_rollout(rollout_id, timeout=10), 15)


async def attempt_ends(store: BridgeStore, rollout_id: str) -> str:
    """The status of the latest attempt once it has ended, which is after its rollout was cancelled."""
    for _ in range(1_000):
        attempt = await store.get_latest_attempt(rollout_id)
        if attempt is not None and attempt.status not in ("preparing", "running"):
            return attempt.status
        await asyncio.sleep(0.01)
    raise AssertionError("the attempt does not end")


async def test_rollout_cancelled_in_a_remote_store_stops_and_others_continue():
    agent, store = WaitingAgent(), BridgeStore()
    with StoreService(store=store) as service:
        async with running(agent, WorkerStore(service.url)):
            first, second = await enqueue(store, 1, 2)
            await agent.says("begins 1", "begins 2")
            await store.update_rollout(first, status="cancelled")
            await agent.says("cancelled 1")
            await agent.says("cleaned up 1")
            assert await attempt_ends(store, first) == "failed"
            agent.let_go.set()
            assert (await end_of(store, second)).status == "succeeded"
        rollout = await store.get_rollout_by_id(first)
        assert rollout is not None
        assert rollout.status == "cancelled"
        assert (await reason_of(store, rollout))[0] == "cancelled"


async def test_only_cancellations_travel():
    agent, store = WaitingAgent(), BridgeStore()
    agent.let_go.set()
    with StoreService(store=store) as service:
        async with running(agent, WorkerStore(service.url)):
            for rollout_id in await enqueue(store, *range(20)):
                assert (await end_of(store, rollout_id)).status == "succeeded"
        assert service.feed.read(FeedPosition())["last"] == 20
        assert service.cancellations.read(FeedPosition())["last"] == 0


async def test_cancellations_during_a_store_outage_are_applied_afterwards():
    agent, store = WaitingAgent(), BridgeStore()
    with StoreService(store=store) as service:
        port = int(service.url.rpartition(":")[2])
        remote = WorkerStore(service.url)
        async with running(agent, remote):
            first, second, third = await enqueue(store, 1, 2, 3)
            await agent.says("begins 1", "begins 2", "begins 3")
            await store.update_rollout(first, status="cancelled")
            await agent.says("cancelled 1")  # it has a position now
            await agent.says("cleaned up 1")
            await asyncio.to_thread(service.stop)
            await store.update_rollout(second, status="cancelled")
            with StoreService(store=store, port=port):
                await agent.says("cancelled 2")
                await agent.says("cleaned up 2")
                await store.update_rollout(third, status="cancelled")
                await agent.says("cancelled 3")
                await agent.says("cleaned up 3")
                for rollout_id in (first, second, third):
                    assert await attempt_ends(store, rollout_id) == "failed"


async def test_rollout_cancelled_between_claim_and_start_does_not_start():
    class SlowResources(BridgeStore):
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def get_resources_by_id(self, resources_id: str) -> Any:
            self.asked.set()
            await self.go_on.wait()
            return await super().get_resources_by_id(resources_id)

    agent, store = WaitingAgent(), SlowResources()
    async with running(agent, store) as runner:
        [rollout_id] = await enqueue(store, 1)
        await asyncio.wait_for(store.asked.wait(), 10)
        await store.update_rollout(rollout_id, status="cancelled")
        store.go_on.set()
        assert await attempt_ends(store, rollout_id) == "failed"
        assert agent.said.empty()
        [other] = await enqueue(store, 2)
        await agent.says("begins 2")
        assert runner._guard is not None
        assert not runner._guard._cancelled_early
        agent.let_go.set()
        assert (await end_of(store, other)).status == "succeeded"


async def test_hearing_of_it_twice_does_not_interrupt_the_agent_s_cleaning_up():
    agent, store = WaitingAgent(), BridgeStore()
    agent.clean_up.clear()
    async with running(agent, store) as runner:
        [rollout_id] = await enqueue(store, 1)
        await agent.says("begins 1")
        runner.cancel(rollout_id)
        await agent.says("cancelled 1")
        runner.cancel(rollout_id)
        runner.cancel(rollout_id)
        await asyncio.sleep(0)  # both have been carried out when the loop comes back to this
        await asyncio.sleep(0)
        agent.clean_up.set()
        await agent.says("cleaned up 1")


async def test_a_stock_client_has_no_such_listener_and_runs_as_before():
    agent, store = WaitingAgent(), BridgeStore()
    agent.let_go.set()
    with StoreService(store=store) as service:
        async with running(agent, LightningStoreClient(service.url)):
            [rollout_id] = await enqueue(store, 1)
            assert (await end_of(store, rollout_id)).status == "succeeded"


async def test_a_stock_server_that_tells_of_none_is_worked_for_as_before(caplog: pytest.LogCaptureFixture):
    from agentlightning.utils.server_launcher import PythonServerLauncherArgs

    agent, store = WaitingAgent(), BridgeStore()
    agent.let_go.set()
    server = LightningStoreServer(
        store, launcher_args=PythonServerLauncherArgs(host="127.0.0.1", access_host="127.0.0.1", launch_mode="thread")
    )
    await server.start()
    caplog.set_level("INFO", logger="agl_slime.store.follow")
    try:
        async with running(agent, RemoteStore(server.endpoint)):
            [rollout_id] = await enqueue(store, 1)
            assert (await end_of(store, rollout_id)).status == "succeeded"
            for _ in range(1_000):
                if caplog.records:
                    break
                await asyncio.sleep(0.01)
    finally:
        await server.stop()
    assert "StoreService" in caplog.text
