"""When a data source looks at a rollout: again, where it may have ended during a look; and not too often."""

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
        """Answers what was so when it was asked, the first time late."""

        def __init__(self) -> None:
            super().__init__()
            self.asked, self.answer = asyncio.Event(), asyncio.Event()
            self.here = asyncio.get_running_loop()

        async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
            found = await super().get_rollout_by_id(rollout_id)
            told = found.model_copy() if found is not None else None
            if not self.asked.is_set() and asyncio.get_running_loop() is not self.here:
                self.here.call_soon_threadsafe(self.asked.set)
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.answer.wait(), self.here))
            return told

    store = Slow()
    with GroupSource(store=store, settings=DataSourceSettings(get_timeout_s=3.0)) as source:
        [rollout_id] = await enqueue(store, 1)
        source.opened([rollout_id])
        source.notify(rollout_id)
        await asyncio.wait_for(store.asked.wait(), 10)
        await finish(store, rollout_id)  # tells the source, which is looking at it
        source.notify(rollout_id)
        store.answer.set()
        assert len(await get(source, 1)) == 1


async def test_looks_at_a_store_that_tells_of_nothing_take_a_tenth_of_the_time() -> None:
    cost_s, asked = 0.05, list[float]()
    enough = asyncio.Event()
    here = asyncio.get_running_loop()

    class Plain(InMemoryLightningStore):
        async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
            asked.append(time.monotonic())
            if len(asked) == 4:
                here.call_soon_threadsafe(enough.set)
            await asyncio.sleep(cost_s)
            return await super().get_rollout_by_id(rollout_id)

    store = Plain(thread_safe=True)
    with GroupSource(store=store, settings=QUICK) as source:
        source.opened([one.rollout_id for one in [await store.enqueue_rollout(input={})]])
        await asyncio.wait_for(enough.wait(), 20)
    assert min(later - earlier for earlier, later in pairwise(asked)) >= 10 * cost_s * 0.95
