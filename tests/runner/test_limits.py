"""Back-pressure, cancellation, draining and the sharing of a queue by concurrent runners."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from agl_slime.runner.concurrent import ConcurrentRunner, RunnerSettings
from agl_slime.runner.thread import RunnerThread
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import EnqueueRolloutRequest
from tests.runner.function_agents import RESOURCES, ClaimCounter, FnAgent, SyncFnAgent, finished, reason_of, running


async def test_sync_agents_are_bounded_by_their_threads() -> None:
    lock = threading.Lock()
    together = 0
    most = 0

    def work(task: Any) -> float:
        nonlocal together, most
        with lock:
            together += 1
            most = max(most, together)
        time.sleep(0.01)  # the agent's own blocking work
        with lock:
            together -= 1
        return 1.0

    async with running(SyncFnAgent(work), max_sync_threads=5) as store:
        rollouts = await finished(store, range(40))
    assert all(rollout.status == "succeeded" for rollout in rollouts)
    assert most == 5


async def test_hanging_sync_agents_are_abandoned_and_others_continue() -> None:
    release = threading.Event()

    def work(task: int) -> float:
        if task < 2:
            release.wait(30)
        return 1.0

    async with running(SyncFnAgent(work), BridgeStore(scan_debounce_seconds=60), max_sync_threads=2) as store:
        rollouts = await finished(store, range(8), timeout_seconds=1.0)
        release.set()
    assert [rollout.status for rollout in rollouts] == ["failed"] * 2 + ["succeeded"] * 6
    assert (await reason_of(store, rollouts[0]))[0] == "timeout"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration(1)])
async def test_whatever_a_sync_agent_raises_ends_its_own_rollout(error: BaseException) -> None:
    def work(task: int) -> float:
        if task == 0:
            raise error
        return 1.0

    async with running(SyncFnAgent(work)) as store:
        first, second = await finished(store, range(2))
        assert (await reason_of(store, first))[0] == type(error).__name__
        assert second.status == "succeeded"


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["agent", "awaited", "left"])
async def test_exceptions_of_an_agents_tasks_end_its_rollout_only(error: Any, where: str) -> None:
    """asyncio raises both out of ``run_forever``, which would end the runner and the run."""
    ended = threading.Event()

    async def nested() -> None:
        ended.set()
        raise error

    async def work(task: int) -> float:
        if task > 0:
            return 1.0
        if where == "agent":
            await nested()
        child = asyncio.create_task(nested())
        if where == "awaited":
            await child
        await asyncio.wait({child})
        return 1.0

    async with running(FnAgent(work)) as store:
        [first] = await finished(store, [0])
        assert ended.is_set()
        if where == "left":
            assert first.status == "succeeded"
        else:
            assert (await reason_of(store, first))[0] == error.__name__
        assert [rollout.status for rollout in await finished(store, [1, 2])] == ["succeeded"] * 2


async def test_a_returned_integer_that_no_float_holds_is_a_bad_reward() -> None:
    async def work(task: int) -> Any:
        return 10**400

    async with running(FnAgent(work)) as store:
        [rollout] = await finished(store, [0])
        assert (await reason_of(store, rollout))[0] == "bad_reward"


async def test_failure_message_with_a_lone_surrogate_keeps_its_reason() -> None:
    """A message that JSON cannot encode must not turn the failure into `no_reward`."""

    async def work(task: int) -> Any:
        raise ValueError("the message is caf\ud800")

    async with running(FnAgent(work)) as store:
        [rollout] = await finished(store, [0])
        assert (await reason_of(store, rollout))[0] == "ValueError"


async def test_rollout_cancelled_in_the_store_stops_and_stays_cancelled() -> None:
    started, stopped = threading.Event(), threading.Event()

    async def work(task: Any) -> float:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            stopped.set()
        return 1.0

    async with running(FnAgent(work)) as store:
        [rollout] = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=0, mode="train")])
        assert await asyncio.to_thread(started.wait, 10)
        await store.update_rollout(rollout.rollout_id, status="cancelled")
        assert await asyncio.to_thread(stopped.wait, 10)
    ended = await store.get_rollout_by_id(rollout.rollout_id)
    assert ended is not None
    assert ended.status == "cancelled"  # the attempt that fails afterwards does not change what was decided


async def test_stop_without_cancel_finishes_rollouts_in_flight() -> None:
    started = threading.Event()
    release = threading.Event()

    async def work(task: int) -> float:
        if task == 0:
            started.set()
            await asyncio.to_thread(release.wait, 10)
        return 1.0

    store = BridgeStore()
    await store.add_resources(RESOURCES)
    runner = RunnerThread(
        agent=FnAgent(work),
        store=store,
        settings=RunnerSettings(poll_interval_s=0.01, heartbeat_interval_s=0, max_concurrent=1),
    )
    with runner:
        first, second = await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=n, mode="train") for n in range(2)]
        )
        assert await asyncio.to_thread(started.wait, 10)
        stopping = asyncio.create_task(asyncio.to_thread(runner.stop, cancel=False))
        for _ in range(2_000):  # until the thread has told the runner
            if runner.runner.stopping:
                break
            await asyncio.sleep(0.005)
        release.set()
        assert await stopping
    statuses = [
        found.status
        for found in [await store.get_rollout_by_id(r.rollout_id) for r in (first, second)]
        if found is not None
    ]
    assert statuses == ["succeeded", "queuing"]


async def test_cancelled_iter_cancels_rollouts_in_flight() -> None:
    started = asyncio.Event()

    async def work(task: Any) -> float:
        started.set()
        await asyncio.sleep(3600)
        return 1.0

    store = BridgeStore()
    await store.add_resources(RESOURCES)
    runner = ConcurrentRunner(settings=RunnerSettings(poll_interval_s=0.01, heartbeat_interval_s=0))
    runner.init(FnAgent(work))
    runner.init_worker(0, store)
    [rollout] = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=0, mode="train")])
    task = asyncio.create_task(runner.iter())
    await asyncio.wait_for(started.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    runner.teardown_worker(0)
    runner.teardown()
    assert runner.in_flight == 0
    assert (await reason_of(store, rollout))[0] == "cancelled"


# -- sharing a queue -------------------------------------------------------------------------------------------------


async def test_runners_share_a_short_queue() -> None:
    """Two idle runners with room for everything, asking in turn: neither takes the whole of a short queue."""
    gate = asyncio.Event()

    async def work(task: Any) -> float:
        await gate.wait()
        return 1.0

    store = BridgeStore()
    await store.add_resources(RESOURCES)
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=n, mode="train") for n in range(60)])
    runners = [ConcurrentRunner(settings=RunnerSettings(), name=name) for name in ("one", "two")]
    for runner in runners:
        runner.init(FnAgent(work))
        runner.init_worker(0, store)
    while store.usage().queued:
        for runner in runners:
            await runner._claim()
    assert [runner.in_flight for runner in runners] == [8 + 16 + 12, 8 + 16]
    gate.set()
    for runner in runners:
        await runner._drain()
        runner.teardown_worker(0)


async def test_a_long_queue_is_claimed_in_large_batches() -> None:
    claims = ClaimCounter()

    async def work(task: Any) -> float:
        return 1.0

    async with running(FnAgent(work), claims, claim_batch=100) as store:
        await finished(store, range(500))
    assert [limit for limit in claims.limits if limit > 8][:5] == [16, 32, 64, 100, 100]
