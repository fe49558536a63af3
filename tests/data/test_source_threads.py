"""``AGLDataSource`` between threads and loops: how it ends, stores that break or say nothing, and its settings."""

from __future__ import annotations

import asyncio
import threading
import time
from argparse import Namespace
from typing import Any

import pytest

from agl_slime import AGLDataSource
from agl_slime.data.results import Outcome
from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import InMemoryLightningStore
from tests.harness.datasource import QUICK, counts_of, get
from tests.harness.stores import enqueue, finish


async def test_stop_wakes_waiting_callers() -> None:
    store = BridgeStore()
    source = GroupSource(store=store, settings=DataSourceSettings(get_timeout_s=600))
    source.opened(await enqueue(store, 1))
    began = time.monotonic()
    waiting = asyncio.ensure_future(get(source, 1))
    await asyncio.wait({waiting}, timeout=0.1)
    source.stop()
    source.stop()
    with pytest.raises(DataSourceError, match="was stopped"):
        await asyncio.wait_for(waiting, 10)
    assert time.monotonic() - began < 10
    assert not [thread for thread in threading.enumerate() if thread is source.follower.thread._thread]


async def test_after_stop_the_store_does_not_call_it_any_more() -> None:
    store = BridgeStore()
    source = GroupSource(store=store)
    source.stop()
    assert store._finished_listeners == []
    [rollout_id] = await enqueue(store, 1)
    await finish(store, rollout_id)  # would raise in the store if it were called on a closed loop
    with pytest.raises(DataSourceError, match="was stopped"):
        source.get_samples(1)


async def test_a_store_that_breaks_surfaces_where_samples_are_waited_for() -> None:
    class Breaking(BridgeStore):
        async def get_latest_attempt(self, rollout_id: str) -> Any:
            raise OSError("the disk is gone")

    store = Breaking()
    with GroupSource(store=store, settings=DataSourceSettings(get_timeout_s=600)) as source:
        source.opened(await enqueue(store, 1))
        waiting = asyncio.ensure_future(get(source, 1))
        [rollout_id] = await enqueue(store, 1)
        await finish(store, rollout_id)
        with pytest.raises(DataSourceError, match="thread ended: the disk is gone"):
            await asyncio.wait_for(waiting, 10)


async def test_a_thread_that_cannot_start_surfaces_too() -> None:
    class NoSubscription(BridgeStore):
        def subscribe_finished(self, listener: Any) -> Any:
            raise RuntimeError("no subscriptions today")

    with (
        GroupSource(store=NoSubscription()) as source,
        pytest.raises(DataSourceError, match="no subscriptions today"),
    ):
        source.get_samples(1)


def test_it_may_be_made_in_any_thread_and_used_in_another() -> None:
    store = BridgeStore()
    made: list[GroupSource] = []
    maker = threading.Thread(target=lambda: made.append(GroupSource(store=store, settings=QUICK)))
    maker.start()
    maker.join(10)
    [source] = made

    async def work() -> None:
        [rollout_id] = await enqueue(store, 1)
        await finish(store, rollout_id)

    worker = threading.Thread(target=lambda: asyncio.run(work()))
    worker.start()
    assert len(source.get_samples(1)) == 1
    worker.join(10)
    source.stop()


async def test_a_plain_store_without_notifications_is_looked_at() -> None:
    store = InMemoryLightningStore(thread_safe=True)
    with GroupSource(store=store, n_samples_per_prompt=2, settings=QUICK) as source:
        unannounced = await enqueue(store, 2, group_id="a", size=2)
        for rollout_id in unannounced:
            await finish(store, rollout_id)
        [group] = await get(source, 1)
        assert {sample.metadata["agl_rollout_id"] for sample in group} == set(unannounced)
        source.expect("b", size=1)
        announced = await enqueue(store, 1, group_id="b", size=1)
        source.opened(announced)
        await finish(store, announced[0])
        [[sample]] = await get(source, 1)
        assert sample.metadata["agl_rollout_id"] == announced[0]


async def test_a_plain_store_hands_out_each_rollout_once() -> None:
    store = InMemoryLightningStore(thread_safe=True)
    settings = DataSourceSettings(get_timeout_s=0.3, poll_interval_s=0.01)
    with GroupSource(store=store, settings=settings) as source:
        [rollout_id] = await enqueue(store, 1)
        await finish(store, rollout_id)
        assert len(await get(source, 1)) == 1
        with pytest.raises(DataSourceError, match="no group"):
            await get(source, 1)  # it goes on looking all the while
        assert counts_of(source) == {Outcome.TRAINED: 1}


async def test_a_thousand_rollouts_take_about_a_second() -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=QUICK) as source:
        ids: list[str] = []
        for group in range(125):
            source.expect(f"g{group}", size=8)
            ids += await enqueue(store, 8, group_id=f"g{group}", size=8)
        source.opened(ids)

        async def finish_all() -> None:
            for rollout_id in ids:
                await finish(store, rollout_id)

        finishing = asyncio.ensure_future(finish_all())
        began = time.process_time()
        groups = await get(source, 125)
        await finishing
        assert sum(map(len, groups)) == 1000
        assert counts_of(source) == {Outcome.TRAINED: 1000}
        # the store's share included; CPU time, so that a busy machine does not fail it
        assert time.process_time() - began < 10


def test_a_data_source_needs_a_store_or_args() -> None:
    with pytest.raises(ConfigError, match="needs a store"):
        AGLDataSource()


def test_the_group_size_comes_from_the_argument_then_from_args_then_is_one() -> None:
    store = BridgeStore()
    for given, args, expected in (
        (3, Namespace(n_samples_per_prompt=5), 3),
        (None, Namespace(n_samples_per_prompt=5), 5),
        (None, None, 1),
    ):
        with AGLDataSource(args, store=store, n_samples_per_prompt=given) as source:
            assert source.groups.n_samples_per_prompt == expected
