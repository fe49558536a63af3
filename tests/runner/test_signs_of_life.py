"""What a runner writes while an attempt runs: spans in few writes, and signs of life for the watchdog."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import emit_reward, find_final_reward
from tests.runner.function_agents import FnAgent, finished, running


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
