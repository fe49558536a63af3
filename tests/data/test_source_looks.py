"""Polls of a data source: repeated where a rollout may have ended during one, and not too frequent."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import InMemoryLightningStore, Rollout
from tests.harness.datasource import QUICK, get
from tests.harness.stores import enqueue, finish


async def test_an_end_that_comes_during_a_look_is_not_lost() -> None:
    """A runner says that an attempt has ended; while the store is asked, the rollout comes to its end."""

    class Slow(BridgeStore):
        """Answers with the state at the time of the request, the first time late."""

        def __init__(self) -> None:
            super().__init__()
            self.called, self.answer = asyncio.Event(), asyncio.Event()
            self.loop = asyncio.get_running_loop()

        async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
            rollout = await super().get_rollout_by_id(rollout_id)
            copy = rollout.model_copy() if rollout is not None else None
            if not self.called.is_set() and asyncio.get_running_loop() is not self.loop:
                self.loop.call_soon_threadsafe(self.called.set)
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.answer.wait(), self.loop))
            return copy

    store = Slow()
    with GroupSource(store=store, settings=DataSourceSettings(get_timeout_s=3.0)) as source:
        [rollout_id] = await enqueue(store, 1)
        source.opened([rollout_id])
        source.notify(rollout_id)
        await asyncio.wait_for(store.called.wait(), 10)
        await finish(store, rollout_id)  # notifies the source, which is reading it
        source.notify(rollout_id)
        store.answer.set()
        assert len(await get(source, 1)) == 1


async def test_polls_of_a_store_without_notifications_take_a_tenth_of_the_time() -> None:
    cost_s, calls = 0.02, list[float]()
    enough = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Plain(InMemoryLightningStore):
        async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
            calls.append(time.monotonic())
            if len(calls) == 4:
                loop.call_soon_threadsafe(enough.set)
            await asyncio.sleep(cost_s)
            return await super().get_rollout_by_id(rollout_id)

    store = Plain(thread_safe=True)
    with GroupSource(store=store, settings=QUICK) as source:
        source.opened(await enqueue(store, 1))
        await asyncio.wait_for(enough.wait(), 20)
    assert min(later - earlier for earlier, later in pairwise(calls)) >= 10 * cost_s * 0.95
