"""A data source that is killed and restarted at any moment, over a store that stays: no rollout is lost, none is
trained twice, and none stays open. The test takes the steps of the source's thread, in any order."""

import asyncio
import json
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Coroutine, Generator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agl_slime import AGLDataSource
from agl_slime.data.completions import CompletionTable
from agl_slime.data.policy import CompleteGroup
from agl_slime.data.results import MemberResult, Outcome
from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.feed import FeedPage, FinishedFeed
from agl_slime.support.agl import InMemoryLightningStore, Rollout
from agl_slime.types import Sample
from tests.data.sources import Running
from tests.harness.datasource import QUICK, get
from tests.harness.examples import examples
from tests.harness.stores import enqueue, finish

SIZE = 2
SETTINGS = DataSourceSettings(blocking=False, policy=CompleteGroup())


class Pause:
    def __await__(self) -> Generator[None, None, None]:
        yield


class Store:
    """A remote store, which may forget released rollouts at any later time."""

    def __init__(self) -> None:
        self.feed = FinishedFeed()
        self.fails: dict[str, bool] = {}
        self.released: list[str] = []

    def follow_finished(self) -> None:
        """Pages are handed over by the test."""

    async def release(self, rollout_ids: list[str]) -> None:
        self.released += rollout_ids

    def end(self, rollout_id: str, *, fails: bool = False) -> None:
        self.fails[rollout_id] = fails
        self.report(rollout_id)

    def report(self, rollout_id: str) -> None:
        self.feed.append(SimpleNamespace(rollout_id=rollout_id))  # type: ignore[arg-type]


class Steps:
    """Stands in for the thread: the test takes its steps."""

    def __init__(self, main: Any, *, name: str) -> None:
        self.looks: list[Coroutine[Any, Any, None]] = []

    def start(self) -> None:
        """No thread."""

    def call(self, callback: Any, *work: Any) -> None:
        if work:
            self.looks.append(work[0](*work[1:]))


class Still:
    """A data source whose thread is never started."""

    def __init__(self, store: Store) -> None:
        with patch("agl_slime.data.completions.LoopThread", Steps):
            self.source = GroupSource(store=store, n_samples_per_prompt=SIZE, settings=SETTINGS, hold=True)  # type: ignore[arg-type]
        self.source.ingestor.read = self._result
        self.looks: list[Coroutine[Any, Any, None]] = self.source.follower.thread.looks  # type: ignore[attr-defined]
        self._store = store

    def page(self) -> None:
        page = self._store.feed.read(self.source.follower.table.position)
        self.source.follower.process_page(page)

    def step(self, index: int) -> None:
        """Continue one poll of a rollout, up to the place where it waits for the store."""
        look = self.looks[index]
        try:
            look.send(None)
        except StopIteration:
            self.looks.remove(look)

    def kill(self) -> None:
        for look in self.looks:
            look.close()

    def saved(self) -> str:
        state = self.source.state()
        self.source.saved(state)
        return json.dumps(state)

    def step_all(self) -> None:
        while self.looks:
            self.step(0)

    @property
    def counts(self) -> tuple[int, int, dict[Outcome, int]]:
        counts = self.source.ledger.counts()
        assert counts.opened == counts.open + counts.ready + sum(counts.closed.values())
        return counts.open, counts.ready, counts.closed

    async def _result(self, rollout_id: str) -> MemberResult | None:
        fails = self._store.fails.get(rollout_id)
        await Pause()  # it may end after the store has answered
        if fails is None:
            return None
        group = rollout_id.split(".")[0]
        sample = Sample(tokens=[1, 2], response_length=1, metadata={"agl_rollout_id": rollout_id})
        return MemberResult(
            rollout_id=rollout_id,
            group_id=group,
            group_size=SIZE,
            samples=() if fails else (sample,),
            failure="broken" if fails else None,
        )


def complete(work: Coroutine[Any, Any, None]) -> None:
    try:
        work.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits")


class Restarts(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = Store()
        self.running: dict[str, bool] = {}
        self.ended: dict[str, bool] = {}
        self.groups = 0
        self.accepted: list[str] = []
        self.source = Still(self.store)
        self.states = [(self.source.saved(), 0)]  # and the length of ``accepted`` at that time

    @initialize(order=st.permutations(range(3)), begun=st.sampled_from([2, 4, 3, 0]))
    def many_wait(self, order: list[int], begun: int) -> None:
        """Rollouts that ended before there was a manager, reported at once; the last of them are being read."""
        for _ in range(3):
            self.enqueue([False] * SIZE)
        for number in order:
            for member in range(SIZE):
                self.end(f"g{number}.{member}")
        self.source.page()
        for index in range(3 * SIZE)[::-1][:begun]:
            self.source.step(index)

    @rule(fails=st.lists(st.booleans(), min_size=SIZE, max_size=SIZE))
    def enqueue(self, fails: list[bool]) -> None:
        self.running.update({f"g{self.groups}.{i}": fail for i, fail in enumerate(fails)})
        self.groups += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.running))))

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def reported_twice(self, data: st.DataObject) -> None:
        self.store.report(data.draw(st.sampled_from(sorted(self.ended))))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def too_early(self, data: st.DataObject) -> None:
        """A notice before the end, as of a runner between two attempts."""
        self.source.source.notify(data.draw(st.sampled_from(sorted(self.running))))

    @rule()
    def notice(self) -> None:
        """Notices before the page of the feed."""
        for rollout_id in self.store.feed.read(self.source.source.follower.table.position)["rollout_ids"][:2]:
            self.source.source.notify(rollout_id)

    @rule()
    def page(self) -> None:
        self.source.page()

    @rule()
    def look_at_all(self) -> None:
        self.source.step_all()

    @precondition(lambda self: self.source.looks)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        self.source.step(data.draw(st.integers(0, len(self.source.looks) - 1)))

    @rule(n=st.integers(1, 3))
    def deliver(self, n: int) -> None:
        for group in self.source.source.get_samples(n):
            self.accepted += [sample.metadata["agl_rollout_id"] for sample in group]

    @rule()
    def save(self) -> None:
        self.states.append((self.source.saved(), len(self.accepted)))

    @rule(forget=st.booleans())
    def two_batches(self, forget: bool) -> None:
        for _ in range(2):
            self.deliver(1)
            self.save()
        complete(self.source.source.follower.release_due(at_least=1))
        self.save()
        if forget:
            for rollout_id in self.store.released:
                self.store.fails.pop(rollout_id, None)
            self.store.released.clear()

    @rule(back=st.integers(0, 2))
    def crash(self, back: int) -> None:
        """Right after a save (0), or to one of the last two states, whose later deliveries come a second time."""
        if back == 0:
            self.save()
        state, taken = self.states[-max(1, back) :][0]
        self.states = [(state, taken)]
        del self.accepted[taken:]
        self.source.kill()
        self.source = Still(self.store)
        self.source.source.restore(json.loads(state))

    @rule(paged=st.booleans())
    def killed_soon(self, paged: bool) -> None:
        """A source that is killed as soon as it starts: two batches, perhaps before its first page of the feed."""
        self.crash(0)
        if paged:
            self.page()
        self.look_at_all()
        self.two_batches(False)

    @invariant()
    def it_adds_up(self) -> None:
        assert self.source.counts

    def end(self, rollout_id: str) -> None:
        self.ended[rollout_id] = self.running.pop(rollout_id)
        self.store.end(rollout_id, fails=self.ended[rollout_id])

    def teardown(self) -> None:
        for rollout_id in [*self.running]:
            self.end(rollout_id)
        self.source.page()
        self.look_at_all()
        self.deliver(self.groups)
        failed = {name for name, fails in self.ended.items() if fails}
        broken = {name.split(".")[0] for name in failed}
        dropped = {name for name in self.ended if name.split(".")[0] in broken}
        assert sorted(self.accepted) == sorted({*self.ended} - dropped)
        expected = {
            Outcome.TRAINED: len(self.ended) - len(dropped),
            Outcome.FILTERED: len(dropped) - len(failed),
            Outcome.FAILED: len(failed),
        }
        assert self.source.counts == (0, 0, {outcome: n for outcome, n in expected.items() if n})
        complete(self.source.source.follower.release_due(at_least=1))
        for _ in range(2):
            self.source.saved()
        state = self.source.source.state()
        assert (state["ended"], state["waiting"]) == ([], []), "a read rollout stays in the state for ever"
        assert not self.source.source.follower.table._ends


Restarts.TestCase.settings = settings(max_examples=examples(100), stateful_step_count=20, deadline=None)
TestRestarts = Restarts.TestCase


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


SERVER = "server"


def page(position: int, ids: list[str]) -> FeedPage:
    return FeedPage(server_instance_id=SERVER, last=position + len(ids), rollout_ids=ids, missed=False)


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data(), feed=st.lists(st.integers(0, 12).map(str), min_size=1, max_size=40), hold=st.booleans())
def test_after_a_crash_exactly_the_unread_completions_come_again(data: st.DataObject, feed: list[str], hold: bool):
    """``feed`` repeats rollouts, as a store does when an end is reported twice."""
    table = CompletionTable(hold=hold, has_feed=True)
    unread: list[str] = []
    read: set[str] = set()  # ended in the ledger
    released: set[str] = set()
    saved: tuple[str, set[str]] | None = None
    for _ in range(data.draw(st.integers(1, 30))):
        step = data.draw(st.sampled_from(["page", "read", "save", "crash"]))
        position = table.position.last
        if step == "page" and position < len(feed):
            fresh = table.add_page(page(position, feed[position : data.draw(st.integers(position + 1, len(feed)))]))
            assert len(set(fresh)) == len(fresh)
            unread += [name for name in fresh if name not in unread]
        elif step == "read" and unread:
            rollout_id = unread.pop(data.draw(st.integers(0, len(unread) - 1)))
            read.add(rollout_id)
            table.read(rollout_id)
        elif step == "save":
            saved = (json.dumps(table.state()), set(read))
            table.saved([])
            released.update(table.due)
            table.due.clear()
        elif step == "crash" and saved is not None:
            state = json.loads(saved[0])
            table, unread = CompletionTable(hold=hold, has_feed=True), []
            table.restore(state)
            read = set(saved[1])
            # the rest of the feed is read, or recognised as read before that state was saved
            rest = set(feed[table.position.last :])
            assert read & rest <= set(state["ended"]) | set(feed[: table.position.last])
            if hold:
                assert not released & (rest - read), "released and needed"
    while unread:
        table.read(unread.pop())
    position = table.position.last
    if position < len(feed):
        for rollout_id in table.add_page(page(position, feed[position:])):
            table.read(rollout_id)
    state = table.state()
    assert state["follow"] == {"server_instance_id": SERVER, "after": len(feed)} or not feed
    assert state["ended"] == []


def test_the_account_does_not_grow_with_the_run() -> None:
    table = CompletionTable(hold=False, has_feed=True)
    for start in range(0, 50_000, 10):
        for rollout_id in table.add_page(page(start, [str(i) for i in range(start, start + 10)])):
            table.read(rollout_id)
        table.due.clear()
    assert table.state() == {"follow": {"server_instance_id": SERVER, "after": 50_000}, "ended": [], "unreleased": []}
    assert len(table._ends) == 0
