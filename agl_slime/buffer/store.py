"""The buffer's store of items: one SQLite database, on disk or in memory.

An item is in flight until its group is decided. Items of a delivered group are kept, invisible to other readers, until
the trainer acknowledges them (``ack``, or by name at its next start) or ``keep_delivered`` newer groups have been
delivered; then they count as trained. Every step is one transaction: after a crash at any moment the counts add up, and
no item is in two deliveries.

Indices over due and idle groups make the cost of a write or a read independent of the number of waiting groups.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, NamedTuple

import orjson

from agl_slime.buffer.models import WrittenItem
from agl_slime.buffer.pipeline import REASON_STAGE_ERROR, FinishedGroup, GroupPipeline
from agl_slime.buffer.records import Records, StoredGroup, insert_many
from agl_slime.buffer.stages import BUFFER_GROUP, Item
from agl_slime.data.results import Outcome
from agl_slime.errors import BufferRequestError
from agl_slime.support.database import Database
from agl_slime.support.http import json_bytes, json_value

_PAGE = 100


@dataclass(slots=True)
class _Task:
    """In-memory state of a task type. ``scope`` is the prefix of its items' uids in the ledger."""

    pipeline: GroupPipeline
    scope: str
    arrived: list[tuple[int, str, float | None]] = field(default_factory=list)
    """Item number, group key and reward of each item since the last batch, for stage 1."""
    refused_bodies: dict[int, bytes] = field(default_factory=dict)
    """Bodies of items since the last batch whose groups were refused, for a custom stage 1."""
    finished_since: list[Any] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    last_refusal: str = ""
    groups_delivered: int = 0


class _Decision(NamedTuple):
    """A finished group, and the JSON of each of its items."""

    group: StoredGroup
    finished: FinishedGroup
    items_json: list[bytes]


@dataclass(frozen=True, slots=True)
class Batch:
    """An answer to a reader: the JSON of each processed item, and meta information."""

    items_json: list[bytes]
    meta_info: dict[str, Any]


class ItemStore(Records):
    """Items, groups and deliveries. The caller must not run ``read`` twice at the same time for one task type."""

    def __init__(
        self,
        *,
        database: Database | None = None,
        max_items: int = 1_000_000_000,
        keep_delivered: int = 4096,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(database=database, clock=clock)
        self._max_items = max_items
        self._keep = keep_delivered
        self._tasks: dict[str, _Task] = {}

    def set_task(self, task: str, pipeline: GroupPipeline, *, scope: str | None = None) -> None:
        """Decide the groups of a task type with this pipeline from now on, including groups that wait."""
        with self._database.transaction() as connection:
            state = self._tasks.setdefault(task, _Task(pipeline, task))
            state.pipeline, state.scope = pipeline, scope or state.scope
            connection.execute(
                "UPDATE groups SET due = count >= ?, accepting = accepting AND count < ? "
                "WHERE task = ? AND delivery_no IS NULL",
                (*_thresholds(pipeline), task),
            )

    def stored_tasks(self) -> set[str]:
        with self._database.reading() as connection:
            return {row[0] for row in connection.execute("SELECT DISTINCT task FROM groups")}

    def write(self, requests: Sequence[tuple[str, Sequence[WrittenItem]]]) -> list[int | BufferRequestError]:
        """Store the items of several requests, each of one task type, in one transaction; a request is stored whole or
        refused. Returns the number of new items, or the error, of each request.

        An item with an existing ``uid`` is a duplicate if its content is the same (a repeated request), else a
        conflict.
        """
        with self._database.reading():
            fresh: dict[str, tuple[str, WrittenItem]] = {}
            with self._database.transaction():
                rollout_ids = [self._rollout_id(task, item) for task, items in requests for item in items]
                stored = self.ledger.instances_of(rollout_ids)
                results = [self._accept(task, items, stored, fresh) for task, items in requests]
                self._insert(fresh)
            for number, (task, item) in enumerate(fresh.values(), self._next_item):
                self._tasks[task].arrived.append((number, item.key, item.reward))
            self.held_items += len(fresh)
            self._next_item += len(fresh)
            return results

    def _accept(
        self,
        task: str,
        items: Sequence[WrittenItem],
        stored: Mapping[str, str | None],
        fresh: dict[str, tuple[str, WrittenItem]],
    ) -> int | BufferRequestError:
        """Add a request's new items to ``fresh``, and check the others against the ``stored`` ones."""
        new: dict[str, tuple[str, WrittenItem]] = {}
        for item in items:
            rollout_id = self._rollout_id(task, item)
            twin = new.get(rollout_id) or fresh.get(rollout_id)
            if twin is None and rollout_id not in stored:
                new[rollout_id] = task, item
                continue
            body = twin[1].body if twin is not None else self._stored_body(task, item, rollout_id)
            # of an item that was dropped only the group can be compared
            if (twin is None and stored[rollout_id] != item.key) or (body is not None and not _same(body, item.body)):
                message = f"uid {item.uid!r} belongs to an item with other content; uids must be unique"
                return BufferRequestError(message, status=409)
        count = self.held_items + len(fresh)
        if count + len(new) > self._max_items:
            message = f"the buffer has {count} of at most {self._max_items} items; write again later"
            return BufferRequestError(message, status=503)
        fresh.update(new)
        return len(new)

    def _stored_body(self, task: str, item: WrittenItem, rollout_id: str) -> bytes | None:
        query = "SELECT body FROM groups JOIN items ON group_no = groups.no WHERE key=? AND task=? AND rollout_id=?"
        row = self._database.connection.execute(query, (item.key, task, rollout_id)).fetchone()
        return None if row is None else row[0]

    def _insert(self, fresh: Mapping[str, tuple[str, WrittenItem]]) -> None:
        self.ledger.open_many([(rollout_id, item.key) for rollout_id, (_, item) in fresh.items()])
        keys = orjson.dumps([*{item.key for _, item in fresh.values()}]).decode()
        accepting = "key IN (SELECT value FROM json_each(?)) AND accepting AND delivery_no IS NULL"
        open_groups = {(group.task, group.key): group for group in self._select(accepting, keys)}
        touched: dict[int, StoredGroup] = {}
        rows: list[tuple[Any, ...]] = []
        now = self._clock()
        for number, (rollout_id, (task, item)) in enumerate(fresh.items(), self._next_item):
            group = open_groups.get((task, item.key))
            if group is None or not group.accepting:
                instance = orjson.dumps(item.instance_id).decode()
                group = open_groups[task, item.key] = self._new_group(task, item.key, instance)
            group.count += 1
            self._touch(group, now)
            touched[group.no] = group
            rows.append((number, group.no, rollout_id, now, item.body))
        self._save(touched.values())
        insert_many(self._database.connection, "items (no, group_no, rollout_id, time, body)", rows)

    def read(
        self,
        task: str,
        *,
        max_groups: int | None = None,
        request_id: str | None = None,
        ack: Sequence[str] = (),
        claim: Lock | None = None,
    ) -> Batch | None:
        """Decide due and timed-out groups, and deliver up to ``max_groups`` valid ones, oldest first; ``None`` when
        there is none.

        The delivery is on disk before this returns: its items are delivered again only for the same ``request_id``,
        which gets the same answer. ``ack``: earlier requests whose items the reader has saved. A caller that stops
        waiting takes ``claim``, and nothing is delivered.
        """
        state = self._tasks[task]
        if ack:
            self.acknowledge(task, ack)
        if request_id is not None and (repeated := self._repeat(task, request_id)) is not None:
            return repeated
        arrived = len(state.arrived)
        meta_info = self._meta_info(state, arrived) if arrived and state.pipeline.custom_meta_info else None
        decided: dict[int, _Decision] = {}
        waiting: list[StoredGroup] = []
        valid = 0
        for group in self._candidates(task, state.pipeline):
            if max_groups is not None and valid >= max_groups:
                break
            if group.no not in decided:
                decision = self._decide(state.pipeline, group)
                if decision is None:
                    waiting.append(group)
                else:
                    decided[group.no] = decision
                    valid += decision.finished.valid
        if claim is not None and not claim.acquire(blocking=False):
            return None  # the caller has stopped waiting; the groups stay
        if waiting:
            with self._database.transaction() as connection:
                for group in waiting:  # not due until the next item, unless that has arrived already
                    connection.execute("UPDATE groups SET due = 0 WHERE no = ? AND count = ?", (group.no, group.count))
        if not decided:
            return None
        if meta_info is None:
            meta_info = self._meta_info(state, arrived) if valid else {}
        batch = self._deliver(task, state, list(decided.values()), request_id, meta_info)
        if batch is not None:
            del state.arrived[:arrived]
            state.refused_bodies.clear()
        return batch

    def _repeat(self, task: str, request_id: str) -> Batch | None:
        query = "SELECT no, meta_info FROM deliveries WHERE task = ? AND request_id = ?"
        with self._database.reading() as connection:
            row = connection.execute(query, (task, request_id)).fetchone()
            if row is None:
                return None
            groups = self._select("delivery_no = ? ORDER BY no", row[0])
        # the stages are pure: they return the same again
        decided = filter(None, (self._decide(self._tasks[task].pipeline, group) for group in groups))
        return Batch([item for decision in decided for item in decision.items_json], orjson.loads(row[1]))

    def _candidates(self, task: str, pipeline: GroupPipeline) -> Iterator[StoredGroup]:
        """Groups that may be finished, the longest idle first, read page by page so that writers are not blocked."""
        late = self._clock() - pipeline.settings.group_timeout_seconds
        for which in ("delivery_no IS NULL AND last_time < ?", "due AND last_time >= ?"):
            last = (0.0, 0)
            condition = f"task = ? AND {which} AND (last_time, no) > (?, ?) ORDER BY last_time, no LIMIT {_PAGE}"
            while page := self._select(condition, task, late, *last):
                yield from page
                last = page[-1].last_time, page[-1].no

    def _decide(self, pipeline: GroupPipeline, group: StoredGroup) -> _Decision | None:
        with self._database.reading() as connection:
            query = "SELECT body FROM items WHERE group_no = ? ORDER BY no"
            items = [json_value(row[0]) for row in connection.execute(query, (group.no,))]
        finished = pipeline.finish(group.instance_id, items, idle_s=self._clock() - group.last_time)
        if finished is None:
            return None
        name = {BUFFER_GROUP: self._name(group)}
        try:
            items_json = [_dump_item({"extra_info": {}, **item, **name}) for item in finished.data]
        except (TypeError, ValueError) as error:  # a stage put a value into an item that is not JSON
            return _Decision(group, FinishedGroup.refused(len(items), REASON_STAGE_ERROR, str(error)), [])
        return _Decision(group, finished, items_json)

    def _deliver(
        self,
        task: str,
        state: _Task,
        decided: Sequence[_Decision],
        request_id: str | None,
        meta_info: Mapping[str, Any],
    ) -> Batch | None:
        items_json = [item for decision in decided for item in decision.items_json]
        with self._database.reading():
            finished_ids = state.finished_since + [decision.group.instance_id for decision in decided]
            meta_info = {**meta_info, "finished_groups": finished_ids}
            with self.ledger.batch():
                delivery_no = None
                if items_json:
                    meta_json = orjson.dumps(meta_info).decode()
                    query = "INSERT INTO deliveries (task, request_id, meta_info, time) VALUES (?, ?, ?, ?)"
                    values = (task, request_id, meta_json, self._clock())
                    delivery_no = self._database.connection.execute(query, values).lastrowid
                for group, finished, _ in decided:
                    self._finalize(group, finished, delivery_no)
                self._trim(self._keep)
            for _, finished, _ in decided:
                self.held_items -= len(finished.item_reasons)
                if finished.valid:
                    state.groups_delivered += 1
                else:
                    state.refused[finished.reason] += 1
                    state.last_refusal = f"{finished.reason}: {finished.detail}"
            state.finished_since = [] if items_json else finished_ids  # sent with the next batch that has data
        return Batch(items_json, meta_info) if items_json else None

    def _finalize(self, group: StoredGroup, finished: FinishedGroup, delivery_no: int | None) -> None:
        connection = self._database.connection
        rows = self._rollouts_of(group)
        late = len(rows) - len(finished.item_reasons)
        if late:  # items that arrived during the decision start another group
            rest = replace(self._new_group(group.task, group.key, group.instance_json), count=late)
            self._touch(rest, self._clock())
            self._save([rest])
            last = "SELECT no FROM items WHERE group_no = ? ORDER BY no DESC LIMIT ?"
            connection.execute(f"UPDATE items SET group_no = ? WHERE no IN ({last})", (rest.no, group.no, late))
        connection.execute(
            "INSERT INTO finished (task, instance_id, group_no) VALUES (?, ?, ?)",
            (group.task, group.instance_json, group.no),
        )
        by_reason: dict[str, list[str]] = {}
        for rollout_id, reason in zip(rows, finished.item_reasons, strict=False):
            by_reason.setdefault(reason, []).append(rollout_id)
        for reason, rollout_ids in by_reason.items():
            if not reason:
                self.ledger.ready_many(rollout_ids)
            else:
                outcome = Outcome.FAILED if reason == REASON_STAGE_ERROR else Outcome.FILTERED
                self.ledger.close_many(rollout_ids, outcome, reason)
        if not finished.valid and (state := self._tasks[group.task]).pipeline.custom_meta_info:
            query = "SELECT no, body FROM items WHERE group_no = ?"
            state.refused_bodies.update(connection.execute(query, (group.no,)).fetchall())
        if finished.valid:
            query = "UPDATE groups SET delivery_no = ?, count = ?, accepting = 0, due = 0 WHERE no = ?"
            connection.execute(query, (delivery_no, len(finished.item_reasons), group.no))
        else:
            self._drop(group)

    def _meta_info(self, state: _Task, arrived: int) -> dict[str, Any]:
        """The result of stage 1 for the first ``arrived`` items since the last batch. The default needs only keys and
        rewards; a custom stage gets the items, also of refused groups."""
        items = state.arrived[:arrived]
        if not state.pipeline.custom_meta_info:
            return state.pipeline.meta_info({"instance_id": key, "reward": reward} for _, key, reward in items)
        with self._database.reading() as connection:
            query = "SELECT body FROM items WHERE no = ?"
            bodies = [
                state.refused_bodies.get(number) or next(connection.execute(query, (number,)), (None,))[0]
                for number, _, _ in items
            ]
        return state.pipeline.meta_info([json_value(body) for body in bodies if body is not None])

    def describe(self, task: str) -> dict[str, Any]:
        with self._database.reading() as connection:
            state = self._tasks[task]
            figures = "count(*), coalesce(sum(count), 0), min(last_time)"
            query = f"SELECT {figures} FROM groups WHERE task = ? AND delivery_no IS NULL"
            groups, items, oldest = connection.execute(query, (task,)).fetchone()
            return {
                "group_size": state.pipeline.settings.group_size,
                "groups_undecided": groups,
                "items_undecided": items,
                "longest_idle_s": 0.0 if oldest is None else round(self._clock() - oldest, 3),
                "groups_delivered": state.groups_delivered,
                "groups_refused": dict(state.refused),
                "last_refusal": state.last_refusal,
            }

    def _touch(self, group: StoredGroup, now: float) -> None:
        due, full = _thresholds(self._tasks[group.task].pipeline)
        group.last_time, group.due, group.accepting = now, group.count >= due, group.count < full

    def _rollout_id(self, task: str, item: WrittenItem) -> str:
        return f"{self._tasks[task].scope}/{item.uid}"


def _thresholds(pipeline: GroupPipeline) -> tuple[int, int]:
    """The numbers of items at which a group is due, and full; with a custom ``is_valid_group`` every group is due and
    none is full."""
    if pipeline.custom_validity:
        return 1, 2**31
    return pipeline.settings.min_valid_group_size, pipeline.settings.group_size


def _dump_item(item: Item) -> bytes:
    try:
        return orjson.dumps(item, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        return json_bytes(item)


def _same(first: bytes, second: bytes) -> bool:
    return first == second or json_value(first) == json_value(second)
