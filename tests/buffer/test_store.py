"""The buffer's store without HTTP: groups, hand-outs, duplicates, restarts."""

import sqlite3
from pathlib import Path
from typing import Any

import orjson
import pytest

from agl_slime.buffer.models import parse_items
from agl_slime.buffer.pipeline import GroupPipeline
from agl_slime.buffer.settings import PipelineSettings
from agl_slime.buffer.store import Batch, ItemStore
from agl_slime.data.results import Outcome
from agl_slime.errors import BufferRequestError, DiskFullError
from agl_slime.support.database import Database
from tests.buffer.items import make_item


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
