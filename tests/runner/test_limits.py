"""Back-pressure, cancellation, draining and the sharing of a queue by concurrent runners."""

import asyncio
import logging
import threading
import time
from typing import Any

import pytest

from agl_slime.runner.concurrent import ConcurrentRunner, RunnerSettings, RunnerThread
from agl_slime.store.bridge import BridgeStore
from agl_slime.support import threads
from agl_slime.support.agl import LitAgent
from tests.harness.stores import enqueue_inputs
from tests.harness.waiting import until
from tests.runner.function_agents import (
    RESOURCES,
    ClaimCounter,
    Concurrency,
    FnAgent,
    SyncFnAgent,
    finished,
    quick,
    reason_of,
    running,
)


async def status_of(store: BridgeStore, rollout_id: str) -> str:
    rollout = await store.get_rollout_by_id(rollout_id)
    assert rollout is not None
    return rollout.status


async def test_sync_agents_are_bounded_by_their_threads() -> None:
    together = Concurrency()

    def work(task: Any) -> float:
        with together.counted():
            time.sleep(0.01)  # the agent's own blocking work
        return 1.0

    async with running(SyncFnAgent(work), max_sync_threads=5) as store:
        assert {rollout.status for rollout in await finished(store, range(40))} == {"succeeded"}
    assert together.most == 5


async def test_hanging_sync_agents_are_abandoned_and_take_the_places_of_others() -> None:
    """Of two places, two threads may hang besides; the third takes a place."""
    release, together = threading.Event(), Concurrency()

    def work(task: int) -> float:
        if task < 3:
            release.wait(30)
        else:
            with together.counted():
                time.sleep(0.01)  # the agent's own blocking work
        return 1.0

    async with running(SyncFnAgent(work), BridgeStore(scan_debounce_seconds=60), max_sync_threads=2) as store:
        hung = await finished(store, range(3), timeout_seconds=0.3)
        others = await finished(store, range(3, 9))
        release.set()
    assert [rollout.status for rollout in hung + others] == ["failed"] * 3 + ["succeeded"] * 6
    assert (await reason_of(store, hung[0]))[0] == "timeout"
    assert together.most == 1


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("raised_in", ["agent", "awaited task", "abandoned task"])
async def test_exceptions_of_an_agents_tasks_end_its_rollout_only(error: Any, raised_in: str) -> None:
    """asyncio raises both out of ``run_forever``, which would end the runner and the run."""
    ended = threading.Event()

    async def nested() -> None:
        ended.set()
        raise error

    async def work(task: int) -> float:
        if task > 0:
            return 1.0
        if raised_in == "agent":
            await nested()
        child = asyncio.create_task(nested())
        if raised_in == "awaited task":
            await child
        await asyncio.wait({child})
        return 1.0

    async with running(FnAgent(work)) as store:
        [first] = await finished(store, [0])
        assert ended.is_set()
        if raised_in == "abandoned task":
            assert first.status == "succeeded"
        else:
            assert (await reason_of(store, first))[0] == error.__name__
        assert [rollout.status for rollout in await finished(store, [1, 2])] == ["succeeded"] * 2


async def test_stop_without_cancel_finishes_rollouts_in_flight() -> None:
    started, release = threading.Event(), threading.Event()

    async def work(task: int) -> float:
        if task == 0:
            started.set()
            await asyncio.to_thread(release.wait, 10)
        return 1.0

    store = BridgeStore()
    await store.add_resources(RESOURCES)
    with RunnerThread(agent=FnAgent(work), store=store, settings=quick(max_concurrent=1)) as runner:
        ids = await enqueue_inputs(store, range(2))
        assert await asyncio.to_thread(started.wait, 10)
        stopping = asyncio.create_task(asyncio.to_thread(runner.stop, cancel=False))
        await until(lambda: runner.runner.stopping)
        release.set()
        assert await stopping
    assert [await status_of(store, rollout_id) for rollout_id in ids] == ["succeeded", "queuing"]


# -- sharing a queue -------------------------------------------------------------------------------------------------


async def test_runners_share_a_short_queue() -> None:
    """Two idle runners with room for everything claim in turn: neither takes the whole of a short queue."""
    gate = asyncio.Event()

    async def work(task: Any) -> float:
        await gate.wait()
        return 1.0

    store = BridgeStore()
    await store.add_resources(RESOURCES)
    await enqueue_inputs(store, range(60))
    runners = [ConcurrentRunner(settings=RunnerSettings(), name=name) for name in ("one", "two")]
    for runner in runners:
        runner.init(FnAgent(work))
        runner.init_worker(0, store)
    while store.usage().queued:
        for runner in runners:
            await runner._claim()
    assert [len(runner._claimed()) for runner in runners] == [8 + 16 + 12, 8 + 16]
    gate.set()
    for runner in runners:
        await runner._drain()
        runner.teardown_worker(0)


async def test_a_long_queue_is_claimed_in_large_batches() -> None:
    claims = ClaimCounter()
    async with running(FnAgent(lambda _: 1.0), claims, claim_batch=50) as store:
        await finished(store, range(240))
    assert [limit for limit in claims.limits if limit > 8][:4] == [16, 32, 50, 50]


# -- agents that do not end --------------------------------------------------------------------------------------------


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


@pytest.fixture
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


@pytest.mark.usefixtures("short_limits")
async def test_an_agent_that_ignores_its_cancellation_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    runner = await started(StubbornAgent(), store := BridgeStore())
    assert not await asyncio.to_thread(runner.stop, cancel=False, timeout_s=0.2)
    assert "its rollouts have not ended" in caplog.text
    caplog.clear()
    assert await asyncio.to_thread(runner.stop, timeout_s=30)
    [rollout] = await store.query_rollouts()
    assert (rollout.status, (await reason_of(store, rollout))[0]) == ("failed", "cancelled")
    [warning] = [message for message in caplog.messages if "cancellation" in message]
    assert f" at {__file__}:" in warning.partition("StubbornAgent.rollout_async() of rollout ro-")[2]
    assert "blocks" not in caplog.text


@pytest.mark.usefixtures("short_limits")
async def test_an_agent_that_blocks_the_end_is_named(caplog: pytest.LogCaptureFixture) -> None:
    agent = BlockingAgent()
    runner = await started(agent)
    assert not await asyncio.to_thread(runner.stop, timeout_s=0.2)
    agent.released.set()
    assert f" at {__file__}:" in caplog.text.partition("BlockingAgent.rollout_async() of rollout ro-")[2]
    assert "blocks its event loop" in caplog.text
    assert await asyncio.to_thread(runner.stop, timeout_s=30)
