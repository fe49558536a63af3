"""Where the buffer keeps what was written: one SQLite database, on disk or in memory.

An item is in flight until its group is decided. The items of a group that is handed out are kept, out of reach of other
readers, until the trainer confirms them (``ack``, or ``skip_instance_ids`` at its next start) or ``keep`` newer groups
have been handed out; then they count as trained. Every step is one transaction, so whatever moment the process dies at,
the account adds up and no item comes out of two hand-outs.

A small index in memory (open groups, oldest first) makes the cost of a write or a read independent of how much is
waiting.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from agl_slime.buffer.errors import BufferFullError, BufferRequestError
from agl_slime.buffer.items import WrittenItem
from agl_slime.buffer.pipeline import FinishedGroup, GroupPipeline, GroupSnapshot
from agl_slime.errors import AglSlimeError
from agl_slime.groups.ledger import Ledger
from agl_slime.groups.results import Outcome
from agl_slime.support.database import Database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS items (
    no INTEGER PRIMARY KEY, group_no INTEGER NOT NULL, rollout_id TEXT NOT NULL, time REAL NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS items_of_group ON items (group_no);
CREATE TABLE IF NOT EXISTS groups (
    no INTEGER PRIMARY KEY, task TEXT NOT NULL, key TEXT NOT NULL, instance_id TEXT NOT NULL, delivery_no INTEGER
);
CREATE INDEX IF NOT EXISTS groups_by_key ON groups (key);
CREATE INDEX IF NOT EXISTS groups_delivered ON groups (delivery_no) WHERE delivery_no IS NOT NULL;
CREATE TABLE IF NOT EXISTS deliveries (
    no INTEGER PRIMARY KEY AUTOINCREMENT, task TEXT NOT NULL, request_id TEXT, meta_info TEXT NOT NULL, time REAL NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS deliveries_by_request ON deliveries (task, request_id) WHERE request_id IS NOT NULL;
CREATE TABLE IF NOT EXISTS finished (no INTEGER PRIMARY KEY AUTOINCREMENT, task TEXT NOT NULL, instance_id TEXT NOT NULL, group_no INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS finished_groups ON finished (group_no);
CREATE TABLE IF NOT EXISTS identity (one INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS runs (
    no INTEGER PRIMARY KEY AUTOINCREMENT, task TEXT NOT NULL, payload TEXT NOT NULL, finished_before INTEGER NOT NULL,
    state TEXT NOT NULL, error TEXT NOT NULL DEFAULT '', started REAL NOT NULL, ended REAL
);
"""

# Names the group that an item was handed out with; a trainer gives these names back when it resumes.
BUFFER_GROUP = "buffer_group"

_OUTCOMES = {"timeout": Outcome.FILTERED, "stage_error": Outcome.FAILED}


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group that still takes items, or waits to be decided."""

    no: int
    key: str
    instance_id: Any
    count: int = 0
    last_time: float = 0.0
    busy: bool = False  # being decided right now: new items of its key start another group

    @property
    def group_id(self) -> Any:
        """What its items say as ``group_id``; ``None`` when they do not."""
        key = orjson.loads(self.key)
        return key[1] if isinstance(key, list) else None


@dataclass(slots=True)
class _Gathered:
    """What came in since the last batch, for stage 1."""

    items: int = 0
    rewards: int = 0
    reward_sum: float = 0.0
    keys: set[str] = field(default_factory=set)
    item_numbers: list[int] = field(default_factory=list)


@dataclass(slots=True)
class TaskIndex:
    """What is known in memory about one task type. ``accepting``: groups by key; ``by_age``: undecided groups, longest
    idle first; ``changed``: those to look at again."""

    pipeline: GroupPipeline
    accepting: dict[str, OpenGroup] = field(default_factory=dict)
    by_age: OrderedDict[int, OpenGroup] = field(default_factory=OrderedDict)
    changed: dict[int, OpenGroup] = field(default_factory=dict)
    gathered: _Gathered = field(default_factory=_Gathered)
    finished_since: list[Any] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    last_refusal: str = ""
    groups_delivered: int = 0


@dataclass(frozen=True, slots=True)
class WriteRequest:
    task: str
    items: Sequence[WrittenItem]


@dataclass(frozen=True, slots=True)
class WriteResult:
    written: int
    duplicates: int


@dataclass(frozen=True, slots=True)
class _NewItem:
    no: int
    group_no: int
    time: float
    item: WrittenItem


@dataclass(frozen=True, slots=True)
class Batch:
    """What a reader gets: processed items, whole groups one after the other, as the JSON that goes out; and what is to
    be told about them."""

    size: int
    data_json: bytes
    meta_info: dict[str, Any]

    @property
    def data(self) -> list[dict[str, Any]]:
        return orjson.loads(self.data_json)


class Claim:
    """Who was first: the reader that commits a hand-out, or the caller that gave up waiting for it. Only the first may
    go on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False

    def take(self) -> bool:
        with self._lock:
            first = not self._taken
            self._taken = True
            return first


class ReadAbandonedError(AglSlimeError):
    """Nobody waits for this batch any more; its groups stay where they were."""


@dataclass(frozen=True, slots=True)
class _Decision:
    """A group that is done, and the JSON of its items without the brackets."""

    group: OpenGroup
    finished: FinishedGroup
    json: bytes


class ItemStore:
    """Items, groups and hand-outs. Thread-safe; ``clock`` gives seconds since the epoch.

    ``read`` must not run twice at the same time for one task type; the caller sees to that.
    """

    def __init__(
        self,
        *,
        database: Database | None = None,
        max_items: int = 1_000_000_000,
        keep_delivered: int = 4096,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database or Database()
        self._clock = clock
        self._max_items = max_items
        self._keep = keep_delivered
        self.ledger = Ledger(database=self._database)
        self._tasks: dict[str, TaskIndex] = {}
        with self._database.transaction() as connection:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute("INSERT OR IGNORE INTO identity VALUES (1, ?)", (uuid.uuid4().hex[:12],))
            self.database_id: str = connection.execute("SELECT name FROM identity").fetchone()[0]
            self._held = 0
            (self._next_item_no,) = connection.execute("SELECT coalesce(max(no), 0) + 1 FROM items").fetchone()
            (self._delivered,) = connection.execute(
                "SELECT count(*) FROM groups WHERE delivery_no IS NOT NULL"
            ).fetchone()

    def close(self) -> None:
        self._database.close()

    # -- task types ---------------------------------------------------------------------------------------------------

    def set_task(self, task: str, pipeline: GroupPipeline) -> None:
        """Decide the groups of a task type with this pipeline from now on; those that wait are looked at again."""
        with self._database.reading():
            index = self._tasks.get(task)
            if index is None:
                index = self._tasks[task] = TaskIndex(pipeline)
                self._load(task, index)
                return
            index.pipeline = pipeline
            index.changed = dict(index.by_age)
            for group in index.by_age.values():
                if not group.busy:
                    self._roll(index, group)

    def has_task(self, task: str) -> bool:
        return task in self._tasks

    def stored_tasks(self) -> list[str]:
        """Task types that have items on disk."""
        with self._database.reading() as connection:
            return [row[0] for row in connection.execute("SELECT DISTINCT task FROM groups ORDER BY task")]

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult | BufferRequestError]:
        """Store the items of several requests in one transaction. A request is stored as a whole or answered with an
        error.

        An item with a known ``uid`` is a duplicate when its content is the same (a repeated request) and a conflict
        when not.
        """
        with self._database.reading():
            held = self._held
            try:
                with self._database.transaction():
                    known = self.ledger.known_among(
                        [f"{request.task}/{item.uid}" for request in requests for item in request.items]
                    )
                    stored: dict[str, _NewItem] = {}
                    results = [self._write_one(request, known, stored) for request in requests]
                    self._insert(stored)
                    return results
            except BaseException:
                self._held = held
                self._reload()
                raise

    def _write_one(
        self, request: WriteRequest, known: Mapping[str, str | None], stored: dict[str, _NewItem]
    ) -> WriteResult | BufferRequestError:
        """Find the places of a request's items; ``stored`` collects what the transaction is to insert."""
        fresh: dict[str, WrittenItem] = {}
        duplicates = 0
        for item in request.items:
            rollout_id = f"{request.task}/{item.uid}"
            twin = fresh.get(rollout_id) or (stored[rollout_id].item if rollout_id in stored else None)
            if twin is not None:
                same = _same_json(twin.body, item.body)
            elif rollout_id in known:
                same = known[rollout_id] == item.key and self._holds_same(request.task, item, rollout_id)
            else:
                fresh[rollout_id] = item
                continue
            if not same:
                return BufferRequestError(
                    f"uid {item.uid!r} is taken by an item with other content; a uid names one item", status=409
                )
            duplicates += 1
        if self._held + len(fresh) > self._max_items:
            return BufferFullError(
                f"the buffer holds {self._held} of at most {self._max_items} items; write again later"
            )
        index = self._tasks[request.task]
        now = self._clock()
        for rollout_id, item in fresh.items():
            group = index.accepting.get(item.key) or self._start_group(index, request.task, item)
            stored[rollout_id] = _NewItem(self._next_item_no, group.no, now, item)
            self._count_in(index, group, item, self._next_item_no, now)
            self._next_item_no += 1
        self._held += len(fresh)
        return WriteResult(len(fresh), duplicates)

    def _insert(self, stored: Mapping[str, _NewItem]) -> None:
        """Few statements for many rows: each statement lets go of the interpreter lock and has to wait to get it back."""
        self.ledger.open_many([(rollout_id, new.item.key) for rollout_id, new in stored.items()])
        rows = [(new.no, new.group_no, rollout_id, new.time, new.item.body) for rollout_id, new in stored.items()]
        for start in range(0, len(rows), 100):
            chunk = rows[start : start + 100]
            marks = ", ".join("(?, ?, ?, ?, ?)" for _ in chunk)
            self._database.connection.execute(
                f"INSERT INTO items (no, group_no, rollout_id, time, body) VALUES {marks}",
                [value for row in chunk for value in row],
            )

    def _holds_same(self, task: str, item: WrittenItem, rollout_id: str) -> bool:
        """Whether a known item has this content; nothing is held against one whose group is decided and gone: its uid
        is used up, whatever it held."""
        query = (
            "SELECT body FROM groups JOIN items ON group_no = groups.no WHERE key = ? AND task = ? AND rollout_id = ?"
        )
        row = self._database.connection.execute(query, (item.key, task, rollout_id)).fetchone()
        return row is None or _same_json(row[0], item.body)

    def _start_group(self, index: TaskIndex, task: str, item: WrittenItem) -> OpenGroup:
        instance_id = orjson.dumps(item.instance_id).decode()
        cursor = self._database.connection.execute(
            "INSERT INTO groups (task, key, instance_id) VALUES (?, ?, ?)", (task, item.key, instance_id)
        )
        group = index.accepting[item.key] = OpenGroup(int(cursor.lastrowid or 0), item.key, item.instance_id)
        return group

    def _count_in(self, index: TaskIndex, group: OpenGroup, item: WrittenItem, number: int, now: float) -> None:
        group.count += 1
        group.last_time = now
        index.by_age[group.no] = group
        index.by_age.move_to_end(group.no)
        index.changed[group.no] = group
        gathered = index.gathered
        gathered.items += 1
        gathered.keys.add(item.key)
        if item.reward is not None:
            gathered.rewards += 1
            gathered.reward_sum += item.reward
        if index.pipeline.custom_meta_info:
            gathered.item_numbers.append(number)
        self._roll(index, group)

    def _roll(self, index: TaskIndex, group: OpenGroup) -> None:
        """Close a group for new items when it is full; with a validity of somebody else's only that function knows when
        it is."""
        full = not index.pipeline.custom_validity and group.count >= index.pipeline.settings.group_size
        if (full or group.busy) and index.accepting.get(group.key) is group:
            del index.accepting[group.key]

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(
        self,
        task: str,
        *,
        max_groups: int | None = None,
        request_id: str | None = None,
        ack: Iterable[str] = (),
        claim: Claim | None = None,
    ) -> Batch | None:
        """Decide the groups that changed or timed out and hand out up to ``max_groups`` valid ones, oldest first;
        ``None`` when there is none.

        The hand-out is on disk before this returns: its items are never handed out again, except to the same
        ``request_id``, which gets the same answer again. ``ack`` names earlier requests whose items the reader holds
        for good. Nothing is handed out when ``claim`` was taken by then.
        """
        index = self._tasks[task]
        self.acknowledge(task, ack)
        if request_id is not None and (again := self._repeat(task, request_id)) is not None:
            return again
        decided: list[_Decision] = []
        taken: list[OpenGroup] = []
        valid = 0
        try:
            while max_groups is None or valid < max_groups:
                candidates = self._take_candidates(index, None if max_groups is None else max_groups - valid)
                if not candidates:
                    break
                taken += candidates
                for group in candidates:
                    decision = self._decide(index.pipeline, group)
                    if decision is not None:
                        decided.append(decision)
                        valid += decision.finished.valid
            if claim is not None and not claim.take():
                raise ReadAbandonedError("nobody waits for this batch any more")
            return self._commit(task, index, decided, request_id) if decided else None
        except BaseException:
            with self._database.reading():
                index.changed.update({group.no: group for group in taken if group.no in index.by_age})
            raise
        finally:
            self._release(index, taken)

    def _decide(self, pipeline: GroupPipeline, group: OpenGroup) -> _Decision | None:
        finished = pipeline.finish(self._snapshot(group), now=self._clock())
        if finished is None:
            return None
        try:
            name = self._group_name(group.no)
            data = orjson.dumps(
                [{**item, BUFFER_GROUP: name} for item in finished.data], option=orjson.OPT_SERIALIZE_NUMPY
            )[1:-1]
        except TypeError as error:  # a stage put something into an item that JSON has no form for
            refused = tuple("stage_error" for _ in finished.item_reasons)
            finished = replace(
                finished, valid=False, data=(), reason="stage_error", detail=str(error), item_reasons=refused
            )
            data = b""
        return _Decision(group, finished, data)

    def _take_candidates(self, index: TaskIndex, limit: int | None) -> list[OpenGroup]:
        """Groups that may be finished, longest waiting first; they take no more items while they are looked at."""
        settings = index.pipeline.settings
        taken: list[OpenGroup] = []
        with self._database.reading():
            now = self._clock()
            for group in index.by_age.values():
                if now - group.last_time <= settings.group_timeout_seconds or len(taken) == limit:
                    break
                if not group.busy:
                    group.busy = True
                    taken.append(group)
            seen: list[int] = []
            for no, group in index.changed.items():
                if len(taken) == limit:
                    break
                seen.append(no)  # the next item brings it back
                if (index.pipeline.custom_validity or group.count >= settings.min_valid_group_size) and not group.busy:
                    group.busy = True
                    taken.append(group)
            for no in seen:
                del index.changed[no]
            for group in taken:
                self._roll(index, group)
            return taken

    def _release(self, index: TaskIndex, taken: Iterable[OpenGroup]) -> None:
        with self._database.reading():
            for group in taken:
                group.busy = False
                if (
                    group.no in index.by_age
                ):  # still undecided: it takes items again, unless a newer group of its key was started meanwhile
                    index.accepting.setdefault(group.key, group)
                    self._roll(index, group)

    def _commit(
        self, task: str, index: TaskIndex, decided: Sequence[_Decision], request_id: str | None
    ) -> Batch | None:
        size = sum(len(decision.finished.data) for decision in decided)
        told = self._meta_info(index) if size else {}
        with self._database.reading():
            finished_ids = index.finished_since + [decision.finished.snapshot.instance_id for decision in decided]
            meta_info = {**told, "finished_groups": finished_ids}
            before = self._held, self._delivered
            try:
                with self.ledger.batch(), self._database.transaction() as connection:
                    delivery_no = None
                    if size:
                        cursor = connection.execute(
                            "INSERT INTO deliveries (task, request_id, meta_info, time) VALUES (?, ?, ?, ?)",
                            (
                                task,
                                request_id,
                                orjson.dumps(meta_info, default=repr, option=orjson.OPT_NON_STR_KEYS).decode(),
                                self._clock(),
                            ),
                        )
                        delivery_no = cursor.lastrowid
                    for decision in decided:
                        self._settle(task, decision.group.no, decision.finished, delivery_no)
                    self._trim()
            except BaseException:
                self._held, self._delivered = before
                raise
            for decision in decided:
                del index.by_age[decision.group.no]
                index.changed.pop(decision.group.no, None)
                if decision.finished.valid:
                    index.groups_delivered += 1
                else:
                    index.refused[decision.finished.reason] += 1
                    index.last_refusal = f"{decision.finished.reason}: {decision.finished.detail}"
            if not size:
                index.finished_since = finished_ids  # told with the next batch that has data
                return None
            index.finished_since = []
        return Batch(size, _join(decided), meta_info)

    def _settle(self, task: str, no: int, group: FinishedGroup, delivery_no: int | None) -> None:
        connection = self._database.connection
        rows = self._rollouts_of(no)
        instance_id = orjson.dumps(group.snapshot.instance_id).decode()
        connection.execute(
            "INSERT INTO finished (task, instance_id, group_no) VALUES (?, ?, ?)", (task, instance_id, no)
        )
        by_reason: dict[str, list[str]] = {}
        for rollout_id, reason in zip(rows, group.item_reasons, strict=True):
            by_reason.setdefault(reason, []).append(rollout_id)
        for reason, rollout_ids in by_reason.items():
            if reason:
                self.ledger.close_many(rollout_ids, _OUTCOMES.get(reason, Outcome.FILTERED), reason)
            else:
                self.ledger.ready_many(rollout_ids)
        self._held -= len(rows)
        if group.valid:
            connection.execute("UPDATE groups SET delivery_no = ? WHERE no = ?", (delivery_no, no))
            self._delivered += 1
        else:
            self._drop_groups([no])

    # -- after the hand-out -------------------------------------------------------------------------------------------

    def acknowledge(self, task: str, request_ids: Iterable[str]) -> int:
        """The reader holds the answers to these requests for good: their items count as trained. Returns the number of
        groups."""
        confirmed = 0
        for request_id in request_ids:
            with self._database.transaction() as connection:
                row = connection.execute(
                    "SELECT no FROM deliveries WHERE task = ? AND request_id = ?", (task, request_id)
                ).fetchone()
                if row is not None:
                    groups = connection.execute("SELECT no FROM groups WHERE delivery_no = ?", row).fetchall()
                    confirmed += self._confirm([no for (no,) in groups])
        return confirmed

    def resume(self, task: str, trained_instances: Iterable[Any], trained_groups: Iterable[str] | None = None) -> int:
        """A trainer starts (again) and says what it has trained: what it was handed and does not name goes out again.
        Returns how many groups do.

        ``trained_groups`` are the ``buffer_group`` names of its items. A trainer that does not keep those is understood
        by ``trained_instances``, each named as often as it was finished, less what it named at its last start and what
        was confirmed or refused since.
        """
        with self._database.reading() as connection:
            query = (
                "SELECT no, instance_id FROM groups WHERE delivery_no IS NOT NULL AND task = ? ORDER BY delivery_no, no"
            )
            delivered = connection.execute(query, (task,)).fetchall()
            if trained_groups is not None:
                names = set(trained_groups)
                trained = [no for no, _ in delivered if self._group_name(no) in names]
            else:
                left = self._trained_since_start(task, trained_instances)
                trained = []
                for no, instance_id in delivered:
                    if left[instance_id] > 0:
                        left[instance_id] -= 1
                        trained.append(no)
            known = set(trained)
            lost = [no for no, _ in delivered if no not in known]
            with self._database.transaction():
                self._confirm(trained)
                for no in lost:
                    self.ledger.reopen_many(self._rollouts_of(no))
                    connection.execute("UPDATE groups SET delivery_no = NULL WHERE no = ?", (no,))
                    connection.execute("DELETE FROM finished WHERE group_no = ?", (no,))
                connection.execute("DELETE FROM deliveries WHERE task = ?", (task,))
            self._delivered -= len(lost)
            self._reload(task)
        return len(lost)

    def _trained_since_start(self, task: str, trained_instances: Iterable[Any]) -> Counter[str]:
        connection = self._database.connection
        trained = Counter(orjson.dumps(instance).decode() for instance in trained_instances)
        row = connection.execute(
            "SELECT payload, finished_before FROM runs WHERE task = ? ORDER BY no DESC LIMIT 1", (task,)
        ).fetchone()
        if row is not None:
            trained.subtract(
                orjson.dumps(instance).decode() for instance in orjson.loads(row[0]).get("skip_instance_ids") or ()
            )
        query = "SELECT instance_id FROM finished WHERE task = ? AND no > ? AND group_no NOT IN (SELECT no FROM groups)"
        trained.subtract(instance_id for (instance_id,) in connection.execute(query, (task, row[1] if row else 0)))
        return trained

    def _confirm(self, groups: Sequence[int]) -> int:
        for no in groups:
            self.ledger.close_many(
                self._rollouts_of(no), Outcome.TRAINED
            )  # not the filtered ones: they have their outcome
        self._drop_groups(groups)
        self._delivered -= len(groups)
        return len(groups)

    def _rollouts_of(self, group_no: int) -> list[str]:
        query = "SELECT rollout_id FROM items WHERE group_no = ? ORDER BY no"
        return [row[0] for row in self._database.connection.execute(query, (group_no,))]

    def _drop_groups(self, groups: Iterable[int]) -> None:
        for no in groups:
            self._database.connection.execute("DELETE FROM items WHERE group_no = ?", (no,))
            self._database.connection.execute("DELETE FROM groups WHERE no = ?", (no,))

    def _trim(self) -> None:
        """Hand-outs beyond the window can no longer be asked for again."""
        surplus = self._delivered - self._keep
        if surplus > 0:
            query = "SELECT no FROM groups WHERE delivery_no IS NOT NULL ORDER BY delivery_no, no LIMIT ?"
            self._confirm([no for (no,) in self._database.connection.execute(query, (surplus,)).fetchall()])
            self._database.connection.execute(
                "DELETE FROM deliveries WHERE no < coalesce((SELECT min(delivery_no) FROM groups WHERE delivery_no IS NOT NULL), no + 1)"
            )

    def _repeat(self, task: str, request_id: str) -> Batch | None:
        with self._database.reading() as connection:
            row = connection.execute(
                "SELECT no, meta_info FROM deliveries WHERE task = ? AND request_id = ?", (task, request_id)
            ).fetchone()
            if row is None:
                return None
            groups = connection.execute(
                "SELECT no, key, instance_id FROM groups WHERE delivery_no = ? ORDER BY no", (row[0],)
            ).fetchall()
        pipeline = self._tasks[task].pipeline
        # the stages are pure: what they said then they say again
        open_groups = [OpenGroup(no, key, orjson.loads(instance_id)) for no, key, instance_id in groups]
        decided = [decision for group in open_groups if (decision := self._decide(pipeline, group)) is not None]
        return Batch(sum(len(decision.finished.data) for decision in decided), _join(decided), orjson.loads(row[1]))

    # -- runs of generators -------------------------------------------------------------------------------------------

    def start_run(self, task: str, payload: dict[str, Any]) -> int:
        """Record that a generator runs; earlier ones of the task type have been replaced."""
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE runs SET state = 'replaced', ended = ? WHERE task = ? AND state = 'running'",
                (self._clock(), task),
            )
            (finished,) = connection.execute("SELECT coalesce(max(no), 0) FROM finished").fetchone()
            cursor = connection.execute(
                "INSERT INTO runs (task, payload, finished_before, state, started) VALUES (?, ?, ?, 'running', ?)",
                (task, orjson.dumps(payload).decode(), finished, self._clock()),
            )
            return int(cursor.lastrowid or 0)

    def end_run(self, no: int, state: str, error: str = "") -> None:
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE runs SET state = ?, error = ?, ended = ? WHERE no = ? AND state = 'running'",
                (state, error, self._clock(), no),
            )

    def last_runs(self) -> dict[str, dict[str, Any]]:
        """The latest run of each task type."""
        query = "SELECT task, no, payload, finished_before, state, error, started, ended FROM runs WHERE no IN (SELECT max(no) FROM runs GROUP BY task)"
        names = ("no", "payload", "finished_before", "state", "error", "started", "ended")
        with self._database.reading() as connection:
            return {
                row[0]: dict(zip(names, (row[1], orjson.loads(row[2]), *row[3:]), strict=True))
                for row in connection.execute(query)
            }

    def finished_after(self, task: str, no: int) -> list[Any]:
        """Instances of the task type that were finished since ``no``, each as often as it was."""
        with self._database.reading() as connection:
            rows = connection.execute(
                "SELECT instance_id FROM finished WHERE task = ? AND no > ? ORDER BY no", (task, no)
            )
            return [orjson.loads(row[0]) for row in rows]

    def undecided(self, task: str) -> list[OpenGroup]:
        """Groups that wait for items or for a reader."""
        with self._database.reading():
            return list(self._tasks[task].by_age.values())

    # -- figures ------------------------------------------------------------------------------------------------------

    @property
    def held_items(self) -> int:
        """Items that were written and not handed out or refused."""
        return self._held

    def describe(self, task: str) -> dict[str, Any]:
        """The task type's figures for ``/stats``."""
        with self._database.reading():
            index = self._tasks[task]
            oldest = next(iter(index.by_age.values()), None)
            return {
                "group_size": index.pipeline.settings.group_size,
                "groups_undecided": len(index.by_age),
                "items_undecided": sum(group.count for group in index.by_age.values()),
                "longest_idle_s": round(self._clock() - oldest.last_time, 3) if oldest else 0.0,
                "groups_delivered": index.groups_delivered,
                "groups_refused": dict(index.refused),
                "last_refusal": index.last_refusal,
            }

    def _group_name(self, no: int) -> str:
        return f"{self.database_id}:{no}"

    # -- internals ----------------------------------------------------------------------------------------------------

    def _snapshot(self, group: OpenGroup) -> GroupSnapshot:
        with self._database.reading() as connection:
            rows = connection.execute("SELECT body FROM items WHERE group_no = ? ORDER BY no", (group.no,)).fetchall()
        items = [orjson.loads(body) for (body,) in rows]
        return GroupSnapshot(instance_id=group.instance_id, items=items, last_item_time=group.last_time, key=group.key)

    def _meta_info(self, index: TaskIndex) -> dict[str, Any]:
        """Stage 1 over what came since the last batch. The default's figures are kept as running sums; a function of
        somebody else's sees the items."""
        with self._database.reading() as connection:
            gathered, index.gathered = index.gathered, _Gathered()
            if not index.pipeline.custom_meta_info:
                return {
                    "total_samples": gathered.items,
                    "num_groups": len(gathered.keys),
                    "avg_group_size": gathered.items / len(gathered.keys) if gathered.keys else 0,
                    "avg_reward": gathered.reward_sum / gathered.rewards if gathered.rewards else 0,
                }
            query = "SELECT body FROM items WHERE no = ?"
            rows = [
                row
                for number in gathered.item_numbers
                if (row := connection.execute(query, (number,)).fetchone()) is not None
            ]
        items = [orjson.loads(body) for (body,) in rows]
        return index.pipeline.meta_info(
            GroupSnapshot(instance_id=item["instance_id"], items=[item], last_item_time=0.0) for item in items
        )

    def _reload(self, task: str | None = None) -> None:
        for name, index in self._tasks.items():
            if task in (None, name):
                self._load(name, index)

    def _load(self, task: str, index: TaskIndex) -> None:
        """The index of what is on disk. The wait for missing items starts anew: nobody could write while the buffer was
        down."""
        query = """
            SELECT groups.no, key, groups.instance_id, count(*) FROM groups JOIN items ON group_no = groups.no
            WHERE task = ? AND delivery_no IS NULL GROUP BY groups.no ORDER BY max(time), groups.no
        """
        index.accepting, index.by_age, index.changed = {}, OrderedDict(), {}
        now = self._clock()
        for no, key, instance_id, count in self._database.connection.execute(query, (task,)).fetchall():
            group = OpenGroup(no, key, orjson.loads(instance_id), count, now)
            index.by_age[no] = index.changed[no] = index.accepting[key] = group
            self._roll(index, group)
        (self._held,) = self._database.connection.execute(
            "SELECT count(*) FROM items JOIN groups ON groups.no = group_no WHERE delivery_no IS NULL"
        ).fetchone()


def _join(decided: Iterable[_Decision]) -> bytes:
    return b"[" + b",".join(decision.json for decision in decided if decision.json) + b"]"


def _same_json(one: bytes, other: bytes) -> bool:
    return one == other or orjson.loads(one) == orjson.loads(other)
