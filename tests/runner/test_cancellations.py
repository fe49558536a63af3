"""A runner that reaches its store over HTTP hears of cancellations there."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.concurrent import ConcurrentRunner
from agl_slime.runner.process_pool import ProcessPool
from agl_slime.runner.worker import WorkerSpec
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import RemoteStore, WorkerStore
from agl_slime.store.feed import FEED_PATH, FeedPosition
from agl_slime.store.server import TOKEN_VARIABLE, StoreService
from agl_slime.support.agl import LightningStore, LightningStoreClient, LightningStoreServer, LitAgent
from tests.harness.stores import enqueue_inputs
from tests.harness.waiting import until
from tests.runner.function_agents import RESOURCES, quick, reason_of


class WaitingAgent(LitAgent[Any]):
    """Reports when it begins a task and when it was cancelled; ends once ``release`` is set."""

    def __init__(self, *, released: bool = False) -> None:
        super().__init__()
        self.reports: asyncio.Queue[str] = asyncio.Queue()
        self.release, self.clean_up = asyncio.Event(), asyncio.Event()
        self.clean_up.set()
        if released:
            self.release.set()

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        self.reports.put_nowait(f"begins {task}")
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.reports.put_nowait(f"cancelled {task}")
            await self.clean_up.wait()
            self.reports.put_nowait(f"cleaned up {task}")
            raise
        return 1.0

    async def expect(self, *reports: str) -> None:
        """The next ones, in any order."""
        assert sorted([await asyncio.wait_for(self.reports.get(), 10) for _ in reports]) == sorted(reports)


@asynccontextmanager
async def running(agent: LitAgent[Any], store: LightningStore) -> AsyncIterator[ConcurrentRunner]:
    runner = ConcurrentRunner(settings=quick())
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


async def expect_success(store: BridgeStore, rollout_id: str) -> None:
    rollout = await asyncio.wait_for(store.wait_for_rollout(rollout_id, timeout=10), 15)
    assert rollout is not None
    assert rollout.status == "succeeded"


async def expect_failed_attempt(store: BridgeStore, rollout_id: str) -> None:
    """The attempt ends some time after its rollout was cancelled."""
    for _ in range(1_000):
        attempt = await store.get_latest_attempt(rollout_id)
        if attempt is not None and attempt.status not in ("preparing", "running"):
            assert attempt.status == "failed"
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the attempt does not end")


async def test_rollout_cancelled_in_a_remote_store_stops_and_others_continue():
    agent, store = WaitingAgent(), BridgeStore()
    with StoreService(store=store) as service:
        async with running(agent, WorkerStore(service.url)):
            first, second = await enqueue(store, 1, 2)
            await agent.expect("begins 1", "begins 2")
            await store.update_rollout(first, status="cancelled")
            await agent.expect("cancelled 1", "cleaned up 1")
            await expect_failed_attempt(store, first)
            agent.release.set()
            await expect_success(store, second)
        rollout = await store.get_rollout_by_id(first)
        assert rollout is not None
        assert rollout.status == "cancelled"
        assert (await reason_of(store, rollout))[0] == "cancelled"


async def test_cancellations_during_a_store_outage_are_applied_afterwards(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agl_slime.store.server._CANCELLED_WINDOW", 1)
    agent, store = WaitingAgent(), BridgeStore()
    with StoreService(store=store) as service:
        port = int(service.url.rpartition(":")[2])
        async with running(agent, WorkerStore(service.url)):
            first, second, third = ids = await enqueue(store, 1, 2, 3)
            await agent.expect("begins 1", "begins 2", "begins 3")
            await store.update_rollout(first, status="cancelled")
            await agent.expect("cancelled 1", "cleaned up 1")  # the runner has a position in the feed
            await asyncio.to_thread(service.stop)
            await store.update_rollout(second, status="cancelled")
            with StoreService(store=store, port=port) as again:
                await agent.expect("cancelled 2", "cleaned up 2")
                await store.update_rollout(third, status="cancelled")
                await agent.expect("cancelled 3", "cleaned up 3")
                for rollout_id in ids:
                    await expect_failed_attempt(store, rollout_id)
                for rollout_id in await enqueue(store, 4, 5):
                    await store.update_rollout(rollout_id, status="cancelled")
                assert again.cancellations._id_set == {rollout_id}  # of which as many are kept as the window holds
                assert again.cancellations.read(FeedPosition())["missed"]  # as a new reader is told


async def test_rollout_cancelled_between_claim_and_start_does_not_start():
    class SlowResources(BridgeStore):
        called, answer = asyncio.Event(), asyncio.Event()

        async def get_resources_by_id(self, resources_id: str) -> Any:
            self.called.set()
            await self.answer.wait()
            return await super().get_resources_by_id(resources_id)

    agent, store = WaitingAgent(), SlowResources()
    async with running(agent, store) as runner:
        [cancelled] = await enqueue(store, 1)
        await asyncio.wait_for(store.called.wait(), 10)
        await store.update_rollout(cancelled, status="cancelled")
        store.answer.set()
        await expect_failed_attempt(store, cancelled)
        assert agent.reports.empty()
        [rollout_id] = await enqueue(store, 2)
        await agent.expect("begins 2")
        assert runner._guard is not None
        assert not runner._guard._cancelled_early
        agent.release.set()
        await expect_success(store, rollout_id)


async def test_a_second_cancellation_does_not_interrupt_the_agents_clean_up():
    agent, store = WaitingAgent(), BridgeStore()
    agent.clean_up.clear()
    async with running(agent, store) as runner:
        [rollout_id] = await enqueue(store, 1)
        await agent.expect("begins 1")
        runner.cancel(rollout_id)
        await agent.expect("cancelled 1")
        runner.cancel(rollout_id)
        runner.cancel(rollout_id)
        for _ in range(2):  # both have been carried out when the loop returns here
            await asyncio.sleep(0)
        agent.clean_up.set()
        await agent.expect("cleaned up 1")


async def test_a_stock_server_or_client_without_cancellations_works_as_usual(caplog: pytest.LogCaptureFixture):
    from agentlightning.utils.server_launcher import PythonServerLauncherArgs

    store = BridgeStore()
    arguments = PythonServerLauncherArgs(host="127.0.0.1", access_host="127.0.0.1", launch_mode="thread")
    server = LightningStoreServer(store, launcher_args=arguments)
    await server.start()
    caplog.set_level("INFO", logger="agl_slime.store.client")
    try:
        for client in (LightningStoreClient, RemoteStore):
            async with running(WaitingAgent(released=True), client(server.endpoint)):
                [rollout_id] = await enqueue(store, 1)
                await expect_success(store, rollout_id)
                if client is RemoteStore:
                    await until(lambda: caplog.records, 10)
    finally:
        await server.stop()
    assert "StoreService" in caplog.text


async def test_a_worker_gets_no_rollout_after_its_end_nor_without_the_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    specs, ended, store = list[WorkerSpec](), threading.Event(), BridgeStore()

    class Played(ProcessPool):
        def _launch(self, spec: WorkerSpec) -> Any:
            specs.append(spec)

        def _wait_for_end(self, worker: Any) -> tuple[str, str]:
            self._supervisor.note_ready()
            return f"killed: {ended.wait(20)}", ""

        def _send(self, worker: Any, command: str) -> None:
            ended.set()

    pool = Played(plan=RunnerPlan("process", 1), agent=WaitingAgent(), store=store).start()
    async with aiohttp.ClientSession(specs[0].store_url) as http:
        for key, status in ((specs[0].store_token, 200), ("", 401)):
            answer = await http.post(FEED_PATH, json={}, headers={"Authorization": f"Bearer {key}"})
            assert answer.status == status
    assert pool.stop()
    await enqueue(store, 1)
    assert await store.dequeue_rollout(worker_id=specs[0].name) is None
