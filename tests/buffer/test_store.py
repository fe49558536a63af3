"""The buffer's store without HTTP: groups, hand-outs, duplicates; at the end, any order of writes, reads and
restarts."""

import math
import sqlite3
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from agl_slime.buffer.models import parse_items
from agl_slime.buffer.pipeline import GroupPipeline
from agl_slime.buffer.settings import PipelineSettings
from agl_slime.buffer.store import Batch, ItemStore
from agl_slime.data.results import Outcome
from agl_slime.errors import BufferRequestError, DiskFullError
from agl_slime.support.database import Database
from tests.buffer.items import make_item
from tests.harness.examples import examples


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def item(uid: str, instance_id: Any = "a", **fields: Any) -> dict[str, Any]:
    return make_item(uid, instance_id, **fields)


def open_store(
    path: Path | None = None,
    *,
    clock: Clock | None = None,
    group_size: int = 2,
    functions: dict[str, Any] | None = None,
    **kwargs: Any,
) -> ItemStore:
    store = ItemStore(database=Database(path=path, exclusive=path is not None), clock=clock or Clock(), **kwargs)
    store.set_task("math", GroupPipeline(functions or {}, settings=PipelineSettings(group_size=group_size)))
    return store


def write(store: ItemStore, *items: dict[str, Any], task: str = "math") -> int:
    _, written = parse_items(orjson.dumps(list(items)))
    (result,) = store.write([(task, written)])
    if isinstance(result, BufferRequestError):
        raise result
    return result


def uids(batch: Batch | None) -> list[str]:
    return [entry["uid"] for entry in map(orjson.loads, batch.items_json)] if batch is not None else []


@pytest.mark.parametrize(
    ("items", "group"),
    [
        ([item("1"), item("2"), item("3")], ["1", "2"]),  # the third starts the instance's next group
        ([item("1", group_id=0), item("2", group_id=1), item("3", group_id=1)], ["2", "3"]),  # epochs
        ([item("1", 7), item("2", "7"), item("3", 7)], ["1", "3"]),  # a number is no text
    ],
)
def test_items_of_an_instance_and_a_group_id_are_a_group(items, group):
    store = open_store()
    write(store, *items)
    assert uids(store.read("math")) == group
    assert store.held_items == 1
    (remaining,) = (entry for entry in items if entry["uid"] not in group)
    write(store, {**remaining, "uid": "4"})
    assert uids(store.read("math")) == [remaining["uid"], "4"]


def test_timed_out_group_is_dropped_and_reported_with_the_next_batch():
    clock = Clock()
    store = open_store(clock=clock, group_size=4)
    write(store, item("1"))
    clock.now += 301
    assert store.read("math") is None
    assert store.ledger.outcome_of("math/1") == (Outcome.FILTERED, "timeout")
    write(store, *(item(f"b{n}", "b") for n in range(4)))
    batch = store.read("math")
    assert batch is not None
    assert batch.meta_info["finished_groups"] == ["a", "b"]


def test_a_late_item_renews_the_wait():
    clock = Clock()
    store = open_store(clock=clock, group_size=4)
    write(store, item("1"), item("2"))
    clock.now += 200
    write(store, item("3"))
    clock.now += 200
    assert store.read("math") is None
    clock.now += 101
    assert len(uids(store.read("math"))) == 4  # three of four, padded


@pytest.mark.parametrize("keep_delivered", [1, 100])
def test_acknowledged_deliveries_and_those_beyond_the_window_are_trained(keep_delivered):
    store = open_store(keep_delivered=keep_delivered)
    for n in range(3):
        write(store, item(f"{n}.0", n), item(f"{n}.1", n))
        store.read("math", request_id=f"r{n}")
    beyond = 4 if keep_delivered == 1 else 0
    assert store.ledger.counts().closed.get(Outcome.TRAINED, 0) == beyond
    assert store.acknowledge("math", ["r2", "unknown"]) == 1
    counts = store.ledger.counts()
    assert (counts.ready, counts.closed) == (4 - beyond, {Outcome.TRAINED: beyond + 2})
    assert uids(store.read("math", request_id="r2")) == []


def test_items_that_arrive_while_a_group_is_decided_begin_another():
    store: ItemStore

    def is_valid_group(group, size):
        if len(group[1]) == 2:
            write(store, item("late"))
        return len(group[1]) >= 2, len(group[1]) >= 2

    store = open_store(functions={"is_valid_group": is_valid_group})
    write(store, item("1"), item("2"))
    assert uids(store.read("math")) == ["1", "2"]
    assert store.held_items == 1


def test_unserializable_group_is_a_recorded_failure():
    functions = {"normalize_group_data": lambda group: (group[0], [{**entry, "note": object()} for entry in group[1]])}
    store = open_store(functions=functions)
    write(store, item("1"), item("2"))
    assert store.read("math") is None
    assert store.ledger.outcome_of("math/1") == (Outcome.FAILED, "stage_error")
    assert store.describe("math")["last_refusal"].startswith(
        "stage_error: Object of type object is not JSON serializable"
    )


def test_a_write_or_a_hand_out_that_cannot_be_stored_leaves_no_trace(tmp_path, monkeypatch):
    store = open_store(tmp_path / "buffer.sqlite")
    write(store, item("1"))

    def fill(name: str) -> None:
        """From now on the disk is full at the end of this step."""
        step = getattr(store, name)

        def full(*args: Any) -> None:
            step(*args)
            raise sqlite3.OperationalError("database or disk is full")

        monkeypatch.setattr(store, name, full)

    fill("_insert")
    with pytest.raises(DiskFullError):
        write(store, item("2"))
    monkeypatch.undo()
    assert store.held_items == 1
    assert write(store, item("2")) == 1
    fill("_finalize")
    with pytest.raises(DiskFullError):
        store.read("math")
    monkeypatch.undo()
    assert uids(store.read("math")) == ["1", "2"]


def test_changed_group_size_applies_to_pending_items():
    store = open_store(group_size=4)
    write(store, item("1"), item("2"))
    assert store.read("math") is None
    store.set_task("math", GroupPipeline(settings=PipelineSettings(group_size=2)))
    assert uids(store.read("math")) == ["1", "2"]


def test_names_of_groups_are_never_given_twice(tmp_path):
    """A trainer names its trained groups by them, at any later time."""
    path = tmp_path / "buffer.sqlite"
    names: list[str] = []
    for n in range(3):
        store = open_store(path, keep_delivered=0)
        for k in range(2):
            write(store, item(f"{n}.{k}.0", k), item(f"{n}.{k}.1", k))
            batch = store.read("math")
            assert batch is not None
            names.append(orjson.loads(batch.items_json[0])["buffer_group"])
        store.close()
    assert len(set(names)) == 6


def test_discarded_task_restarts_and_counts_add_up():
    store = open_store()
    write(store, item("1"), item("2"), item("3", "b"))
    store.read("math")
    store.discard("math")
    assert store.ledger.counts().closed == {Outcome.TRAINED: 2, Outcome.CANCELLED: 1}
    assert store.held_items == 0
    store.set_task("math", GroupPipeline(settings=PipelineSettings(group_size=2)), scope="math#2")
    assert write(store, item("1"), item("2", reward=0.0)) == 2
    assert uids(store.read("math")) == ["1", "2"]


TASK = "sums"
TIMEOUT_S = 300.0


class BufferMachine(RuleBasedStateMachine):
    requests = Bundle("requests")

    @initialize(group_size=st.integers(1, 4), keep=st.sampled_from([0, 1, 100]))
    def begin(self, group_size: int, keep: int) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.group_size, self.keep = group_size, keep
        self.now = 1000.0
        self.accepted: dict[str, dict[str, Any]] = {}
        self.out: Counter[str] = Counter()  # uids that are with the reader
        self.groups_out: dict[str, list[str]] = {}  # by name, the uids of each group that is with the reader
        self.trained: set[str] = set()  # names of groups that the reader keeps for good
        self.answers: dict[str, Batch | None] = {}
        self.next_request = 0
        self.store = self._open()

    def _open(self) -> ItemStore:
        database = Database(path=Path(self.directory.name) / "buffer.sqlite", exclusive=True)
        store = ItemStore(database=database, keep_delivered=self.keep, clock=lambda: self.now)
        store.set_task(
            TASK, GroupPipeline(settings=PipelineSettings(group_size=self.group_size, reward_range=(0.0, 1.0)))
        )
        return store

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.directory.cleanup()

    # -- what may happen ----------------------------------------------------------------------------------------------

    @rule(
        entries=st.lists(
            st.tuples(
                st.integers(0, 30),
                st.integers(0, 2),
                st.sampled_from([-1.0, 0.0, 0.5, 1.0]),
                st.sampled_from([None, 0, 1]),
            ),
            min_size=1,
            max_size=6,
        )
    )
    def write(self, entries: list[tuple[int, int, float, int | None]]) -> None:
        items = [
            {"uid": f"u{uid}", "instance_id": f"i{instance}", "messages": [], "reward": reward, "group_id": group_id}
            for uid, instance, reward, group_id in entries
        ]
        _, written = parse_items(orjson.dumps(items))
        (result,) = self.store.write([(TASK, written)])
        if isinstance(result, BufferRequestError):
            assert result.status == 409
            first_items = dict(self.accepted)
            conflicts = 0
            for item in items:
                conflicts += first_items.setdefault(item["uid"], item) != item
            assert conflicts
            return
        for item in items:
            if item["uid"] in self.accepted and self.store.ledger.is_open(f"{TASK}/{item['uid']}"):
                assert self.accepted[item["uid"]] == item  # an item that is held must not be taken for another
        fresh = {item["uid"]: item for item in items if item["uid"] not in self.accepted}
        assert result == len(fresh)
        self.accepted.update(fresh)

    @rule(seconds=st.sampled_from([1.0, 150.0, TIMEOUT_S + 1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(target=requests, max_groups=st.sampled_from([None, 1, 2]))
    def read(self, max_groups: int | None) -> str:
        request_id = f"r{self.next_request}"
        self.next_request += 1
        batch = self.store.read(TASK, max_groups=max_groups, request_id=request_id)
        if batch is not None:
            self._take(batch, max_groups)
            self.answers[request_id] = batch
        return request_id

    @rule(request_id=requests)
    def ask_again(self, request_id: str) -> None:
        """The answer was lost: the same request gets it again, unless the groups were confirmed or forgotten in
        between."""
        first = self.answers.get(request_id)
        if first is None:
            return
        names = {item["buffer_group"] for item in map(orjson.loads, first.items_json)}
        intact = {name for name in names if name in self.groups_out and name not in self.trained}
        if intact == names and len(self.groups_out) <= self.keep:
            assert self.store.read(TASK, request_id=request_id) == first

    @rule(request_id=consumes(requests))
    def acknowledge(self, request_id: str) -> None:
        first = self.answers.pop(request_id, None)
        self.store.acknowledge(TASK, [request_id])
        if first is not None:
            names = {item["buffer_group"] for item in map(orjson.loads, first.items_json)}
            self.trained |= names & self.groups_out.keys()

    @rule()
    def restart_buffer(self) -> None:
        self.store.close()
        self.store = self._open()

    @rule(data=st.data())
    def restart_trainer(self, data: st.DataObject) -> None:
        """The trainer remembers some of the groups that it was handed; the others go out again as far as the buffer
        still has them."""
        open_names = sorted(self.groups_out.keys() - self.trained)
        remembered = set(data.draw(st.sets(st.sampled_from(open_names)))) if open_names else set()
        old_counts = self.store.ledger.counts()
        lost = self.store.resume(TASK, [], trained_groups=remembered | self.trained)
        if self.keep == 100:
            assert lost == len(open_names) - len(remembered)
        assert self.store.ledger.counts().ready == 0
        assert self.store.ledger.counts().opened == old_counts.opened
        self.trained |= remembered
        self.answers.clear()
        gone = [name for name in open_names if name not in remembered]
        for name in gone:
            uids = self.groups_out.pop(name)
            if any(self.store.ledger.is_open(f"{TASK}/{uid}") for uid in uids):
                self.out.subtract(uids)  # they may come out once more
            else:
                self.trained.add(name)  # beyond the window: counted as trained
                self.groups_out[name] = uids

    # -- what must hold -----------------------------------------------------------------------------------------------

    def _take(self, batch: Batch, max_groups: int | None) -> None:
        data = [*map(orjson.loads, batch.items_json)]
        assert data
        assert len(data) % self.group_size == 0
        assert max_groups is None or len(data) <= max_groups * self.group_size
        assert {item["instance_id"] for item in data} <= set(batch.meta_info["finished_groups"])
        for start in range(0, len(data), self.group_size):
            group = data[start : start + self.group_size]
            assert len({item["instance_id"] for item in group}) == 1
            assert len({item["uid"] for item in group}) == self.group_size
            assert math.isclose(math.fsum(item["reward"] for item in group), 0.0, abs_tol=1e-6)
            unpadded = [item for item in group if "padding_of" not in item]
            assert {item["padding_of"] for item in group if "padding_of" in item} <= {item["uid"] for item in unpadded}
            for item in unpadded:
                self.out[item["uid"]] += 1
                assert self.out[item["uid"]] == 1, f"{item['uid']} came out twice"
                assert self.accepted[item["uid"]]["reward"] == item["raw_reward"]
                assert 0 <= item["raw_reward"] <= 1
            self.groups_out[group[0]["buffer_group"]] = [item["uid"] for item in unpadded]

    @invariant()
    def every_item_is_accounted_for(self) -> None:
        if not hasattr(self, "store"):
            return
        counts = self.store.ledger.counts()
        assert counts.opened == len(self.accepted)
        assert counts.opened == counts.open + counts.ready + sum(counts.closed.values())
        with_reader = sum(1 for n in self.out.values() if n > 0)
        assert counts.ready + counts.closed.get(Outcome.TRAINED, 0) == with_reader
        undecided = self.store.undecided(TASK)
        assert self.store.held_items == sum(group.count for group in undecided)
        assert counts.open <= self.store.held_items
        for uid in self.accepted:
            if self.store.ledger.is_open(f"{TASK}/{uid}"):
                assert self.out[uid] == 0


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
