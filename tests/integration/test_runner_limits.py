"""Back-pressure, cancellation, draining, signs of life and the lag monitor of the concurrent runner."""

from __future__ import annotations

import asyncio
import itertools
import logging
import selectors
import threading
import time
from typing import Any

import pytest

from agl_slime.errors import ConfigError
from agl_slime.runner import guard, lag
from agl_slime.runner.concurrent import ConcurrentRunner, RunnerSettings
from agl_slime.runner.thread import RunnerThread
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import EnqueueRolloutRequest, LitAgent, emit_reward, find_final_reward
from tests.integration.test_runner_concurrent import RESOURCES, FnAgent, finished, reason_of, running


class SyncFnAgent(LitAgent[Any]):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self._fn = fn

    def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
        return self._fn(task)


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


async def test_sync_agents_that_hang_are_abandoned_and_the_others_go_on() -> None:
    release = threading.Event()

    def work(task: int) -> float:
        if task < 2:
            release.wait(30)
        return 1.0

    async with running(SyncFnAgent(work), BridgeStore(scan_debounce_seconds=60), max_sync_threads=2) as store:
        rollouts = await finished(store, range(8), timeout_seconds=0.3)
        release.set()
    assert [rollout.status for rollout in rollouts] == ["failed"] * 2 + ["succeeded"] * 6
    assert (await reason_of(store, rollouts[0]))[0] == "timeout"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration(1)])
async def test_whatever_a_sync_agent_raises_ends_its_own_rollout(error: BaseException) -> None:
    # fault 32
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
async def test_what_a_task_of_an_agent_raises_ends_its_own_rollout(error: Any, where: str) -> None:
    """fault 32: asyncio lets both through to whoever runs the loop, which ended the runner and the run."""
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
    # fault 32
    async def work(task: int) -> Any:
        return 10**400

    async with running(FnAgent(work)) as store:
        [rollout] = await finished(store, [0])
        assert (await reason_of(store, rollout))[0] == "bad_reward"


async def test_a_lone_surrogate_is_told_by_its_own_reason() -> None:
    """fault 32: the exception with the text in it could not be written, and the rollout counted as `no_reward`."""

    async def work(task: int) -> Any:
        raise ValueError("the message is caf\ud800")

    async with running(FnAgent(work)) as store:
        [rollout] = await finished(store, [0])
        assert (await reason_of(store, rollout))[0] == "ValueError"


async def test_a_rollout_that_is_cancelled_in_the_store_stops_and_stays_cancelled() -> None:
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


async def test_stopping_without_cancelling_lets_what_is_in_flight_finish() -> None:
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


async def test_an_agent_that_ignores_the_end_of_the_runner_does_not_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_CANCEL_GRACE_S", 0.2)
    started = threading.Event()
    release = threading.Event()

    async def work(task: Any) -> float:
        started.set()
        while not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        return 1.0

    store = BridgeStore()
    await store.add_resources(RESOURCES)
    runner = RunnerThread(
        agent=FnAgent(work), store=store, settings=RunnerSettings(poll_interval_s=0.01, heartbeat_interval_s=0)
    )
    with runner:
        [rollout] = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=0, mode="train")])
        assert await asyncio.to_thread(started.wait, 10)
        stopping = asyncio.create_task(asyncio.to_thread(runner.stop, timeout_s=15))
        ended = await asyncio.wait_for(store.wait_for_rollout(rollout.rollout_id, timeout=10), 15)
        release.set()  # asyncio.run waits for the abandoned task itself at the very end
        assert await stopping
    assert ended is not None
    assert ended.status == "failed"
    assert (await reason_of(store, rollout))[0] == "cancelled"


async def test_cancelling_iter_cancels_what_is_in_flight() -> None:
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


# -- signs of life ---------------------------------------------------------------------------------------------------


class CountingStore(BridgeStore):
    """Says how many spans came in each write, and when each fifth has."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.writes: list[int] = []
        self.wrote = threading.Event()

    async def add_many_spans(self, spans: Any) -> Any:
        self.writes.append(len(spans))
        self.wrote.set()
        return await super().add_many_spans(spans)


async def test_spans_of_a_rollout_are_written_in_one_call() -> None:
    async def work(task: Any) -> None:
        for n in range(20):
            emit_reward(float(n))

    async with running(FnAgent(work), store := CountingStore()):
        [rollout] = await finished(store, [0])
        assert store.writes == [20]
        spans = [*await store.query_spans(rollout.rollout_id, "latest")]
        assert [span.sequence_id for span in spans] == list(range(1, 21))
        assert find_final_reward(spans) == 19


async def test_a_long_attempt_writes_its_spans_while_it_runs() -> None:
    store = CountingStore()

    async def work(task: Any) -> None:
        for n in range(10):
            store.wrote.clear()
            emit_reward(float(n))
            if n % 4 == 3:
                assert await asyncio.to_thread(store.wrote.wait, 10)  # the write happens while the agent runs

    async with running(FnAgent(work), store, flush_interval_s=0.02):
        [rollout] = await finished(store, [0])
        assert rollout.status == "succeeded"
        assert store.writes == [4, 4, 2]
        spans = [*await store.query_spans(rollout.rollout_id, "latest")]
        assert [span.sequence_id for span in spans] == list(range(1, 11))


async def test_a_watchdog_that_waits_for_signs_of_life_gets_them() -> None:
    """unresponsive_seconds is short of the attempt's length, and the attempt makes a span now and then."""
    store = CountingStore(scan_debounce_seconds=0.1)

    async def work(task: Any) -> float:
        for n in range(14):
            emit_reward(float(n))
            await store.query_workers()  # any store call has the watchdog look
            await asyncio.sleep(0.12)
        return 1.0

    async with running(FnAgent(work), store):
        [rollout] = await finished(store, [0], unresponsive_seconds=1.2)
        assert rollout.status == "succeeded"
        assert len(store.writes) > 1


async def test_spans_that_could_not_be_written_early_are_written_at_the_end() -> None:
    class FailingOnce(CountingStore):
        async def add_many_spans(self, spans: Any) -> Any:
            if not self.writes:
                self.writes.append(0)
                self.wrote.set()
                raise ConnectionError("the store is away")
            return await super().add_many_spans(spans)

    store = FailingOnce()

    async def work(task: Any) -> None:
        for n in range(3):
            emit_reward(float(n))
        assert await asyncio.to_thread(store.wrote.wait, 10)
        emit_reward(3.0)

    async with running(FnAgent(work), store, flush_interval_s=0.02):
        [rollout] = await finished(store, [0])
        assert rollout.status == "succeeded"
        assert sum(store.writes) == 4
        assert find_final_reward([*await store.query_spans(rollout.rollout_id, "latest")]) == 3


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
    claims: list[int] = []

    class Store(BridgeStore):
        async def dequeue_many_rollouts(self, *, limit: int = 1, worker_id: str | None = None) -> Any:
            claims.append(limit)
            return await super().dequeue_many_rollouts(limit=limit, worker_id=worker_id)

    async def work(task: Any) -> float:
        return 1.0

    async with running(FnAgent(work), Store(), claim_batch=100) as store:
        await finished(store, range(500))
    assert [limit for limit in claims if limit > 8][:5] == [16, 32, 64, 100, 100]


# -- blocked loops ---------------------------------------------------------------------------------------------------


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
    assert "test_runner_limits.py" in record.getMessage()
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


@pytest.mark.parametrize(
    "bad",
    [
        {"max_concurrent": 0},
        {"max_sync_threads": 0},
        {"claim_batch": 0},
        {"poll_interval_s": 0.0},
        {"flush_interval_s": 0.0},
        {"heartbeat_interval_s": -1.0},
        {"lag_warning_s": -1.0},
        {"timeout_s": 0.0},
        {"max_restarts": -1},
    ],
)
def test_settings_that_cannot_be_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        RunnerSettings(**bad)
