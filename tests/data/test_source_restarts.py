"""A data source that is killed and restarted at any moment, over a store that stays: no rollout is lost, none is
trained twice, and none stays open. The test takes the steps of the source's thread, in any order."""

import json
from collections.abc import Coroutine, Generator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agl_slime.data.policy import CompleteGroup
from agl_slime.data.results import MemberResult, Outcome
from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.store.feed import FinishedFeed
from agl_slime.types import Sample
from tests.harness.examples import examples

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
        self.source.follower.take(page)

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
