"""``AGLDataSource`` between threads and loops: its end, its polls, stores that break, and its settings."""

import asyncio
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from agl_slime import AGLDataSource
from agl_slime.data.results import Outcome
from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import InMemoryLightningStore, Rollout
from tests.data.sources import Running
from tests.harness.datasource import QUICK, get
from tests.harness.stores import enqueue, finish


async def test_stop_wakes_waiting_callers_and_leaves_the_store() -> None:
    with Running(settings=DataSourceSettings(get_timeout_s=600)) as running:
        ids = await running.opened()
        waiting = asyncio.ensure_future(running.get())
        await asyncio.wait({waiting}, timeout=0.1)
        running.source.stop()
        running.source.stop()
        with pytest.raises(DataSourceError, match="was stopped"):
            await asyncio.wait_for(waiting, 10)
        assert running.source.follower.thread._thread not in threading.enumerate()
        assert running.store._finished_listeners == {}
        await running.finish(ids)  # would raise in the store if it called a closed loop
        with pytest.raises(DataSourceError, match="was stopped"):
            running.source.get_samples(1)


async def test_its_thread_starts_at_the_first_use_or_completion() -> None:
    uses: dict[str, Callable[[GroupSource], object]] = {
        "expect": lambda source: source.expect("g", size=1),
        "opened": lambda source: source.opened(["ro-1"]),
        "notify": lambda source: source.notify("ro-1"),
        "begin": lambda source: source.follower.begin(),
    }
    store = BridgeStore()
    for how in (*uses, "completion", "stop"):
        source = GroupSource(store=store, settings=QUICK)
        assert not source.follower.thread.alive
        if how == "stop":
            source.stop()
        elif how == "completion":
            await finish(store, *await enqueue(store, 1))
        uses.get(how, lambda _: None)(source)
        assert source.follower.thread.alive == (how != "stop"), how
        source.stop()
        uses["begin"](source)
        assert not source.follower.thread.alive
    assert store._finished_listeners == {}


async def test_a_store_that_breaks_surfaces_where_samples_are_waited_for() -> None:
    class Breaking(BridgeStore):
        async def get_latest_attempt(self, rollout_id: str) -> Any:
            raise OSError("the disk is gone")

    with Running(Breaking(), DataSourceSettings(get_timeout_s=600)) as running:
        await running.opened()
        waiting = asyncio.ensure_future(running.get())
        await running.finish(await enqueue(running.store, 1))
        with pytest.raises(DataSourceError, match="thread ended: the disk is gone"):
            await asyncio.wait_for(waiting, 10)


def test_it_may_be_made_in_any_thread_and_used_in_another() -> None:
    store = BridgeStore()
    sources: list[GroupSource] = []
    maker = threading.Thread(target=lambda: sources.append(GroupSource(store=store, settings=QUICK)))
    maker.start()
    maker.join(10)
    [source] = sources

    async def work() -> None:
        [rollout_id] = await enqueue(store, 1)
        await finish(store, rollout_id)

    worker = threading.Thread(target=lambda: asyncio.run(work()))
    worker.start()
    assert len(source.get_samples(1)) == 1
    worker.join(10)
    source.stop()


async def test_a_plain_store_without_notifications_hands_out_each_rollout_once() -> None:
    store = InMemoryLightningStore(thread_safe=True)
    settings = DataSourceSettings(get_timeout_s=0.5, poll_interval_s=0.01)
    with Running(store, settings, n_samples_per_prompt=2) as running:
        unannounced = await enqueue(store, 2, group_id="a", size=2)
        await running.finish(unannounced)
        [group] = await running.get_ids()
        assert set(group) == set(unannounced)
        announced = await running.opened("b")
        await running.finish(announced)
        assert await running.get_ids() == [announced]
        with pytest.raises(DataSourceError, match="no group"):
            await running.get()  # it polls all the while
        assert running.counts == {Outcome.TRAINED: 3}


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


def test_the_group_size_comes_from_the_argument_then_from_args_then_is_one() -> None:
    with pytest.raises(ConfigError, match="needs a store"):
        AGLDataSource()
    args = Namespace(n_samples_per_prompt=5)
    for options, argument, size in (({"n_samples_per_prompt": 3}, args, 3), ({}, args, 5), ({}, None, 1)):
        with AGLDataSource(argument, store=BridgeStore(), **options) as source:
            assert source.groups.n_samples_per_prompt == size
