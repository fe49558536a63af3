"""Writes of a runner while an attempt runs: spans in few calls, and signs of life for the watchdog."""

import asyncio
import threading
from typing import Any

import pytest

from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import emit_reward
from tests.runner.function_agents import FnAgent, finished, running, spans_of


class CountingStore(BridgeStore):
    """Counts the spans of each write, and fails the first ``failures`` writes."""

    def __init__(self, *, failures: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.failures = failures
        self.writes: list[int] = []
        self.wrote = threading.Event()

    async def add_many_spans(self, spans: Any) -> Any:
        self.wrote.set()
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the store is away")
        self.writes.append(len(spans))
        return await super().add_many_spans(spans)


@pytest.mark.parametrize(("count", "failures", "writes"), [(10, 0, [4, 4, 2]), (10, 1, [8, 2]), (8, 2, [8])])
async def test_a_long_attempt_writes_its_spans_while_it_runs(count: int, failures: int, writes: list[int]) -> None:
    """Spans of a write that failed come with the next one, at the latest at the end."""
    store = CountingStore(failures=failures)

    async def work(task: Any) -> None:
        for n in range(count):
            store.wrote.clear()
            emit_reward(float(n))
            if n % 4 == 3:
                assert await asyncio.to_thread(store.wrote.wait, 10)  # the write happens while the agent runs

    async with running(FnAgent(work), store, flush_interval_s=0.02):
        [rollout] = await finished(store, [0])
        assert rollout.status == "succeeded"
        assert store.writes == writes
        assert [span.sequence_id for span in await spans_of(store, rollout)] == list(range(1, count + 1))


async def test_a_watchdog_that_waits_for_signs_of_life_gets_them() -> None:
    """unresponsive_seconds is shorter than the attempt, which makes a span now and then."""
    store = CountingStore(scan_debounce_seconds=0.1)

    async def work(task: Any) -> float:
        for n in range(14):
            emit_reward(float(n))
            await store.query_workers()  # any store call runs the watchdog
            await asyncio.sleep(0.12)
        return 1.0

    async with running(FnAgent(work), store):
        [rollout] = await finished(store, [0], unresponsive_seconds=1.2)
        assert rollout.status == "succeeded"
        assert len(store.writes) > 1
