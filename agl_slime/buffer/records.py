"""The tables of the buffer's database, and what passes between the store and its callers."""

from __future__ import annotations

import sqlite3
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import orjson

from agl_slime.groups.ledger import Ledger
from agl_slime.groups.results import Outcome
from agl_slime.support.database import Database

# ``accepting``: takes more items. ``due``: has enough items to be decided, and was not looked at since the last one.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS items (
    no INTEGER PRIMARY KEY, group_no INTEGER NOT NULL, rollout_id TEXT NOT NULL, time REAL NOT NULL, body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS items_of_group ON items (group_no);
CREATE TABLE IF NOT EXISTS groups (
    no INTEGER PRIMARY KEY, task TEXT NOT NULL, key TEXT NOT NULL, instance_id TEXT NOT NULL, delivery_no INTEGER,
    count INTEGER NOT NULL, last_time REAL NOT NULL, accepting INTEGER NOT NULL, due INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS groups_by_key ON groups (key);
CREATE INDEX IF NOT EXISTS groups_delivered ON groups (delivery_no) WHERE delivery_no IS NOT NULL;
CREATE INDEX IF NOT EXISTS groups_due ON groups (task, last_time) WHERE due;
CREATE INDEX IF NOT EXISTS groups_idle ON groups (task, last_time) WHERE delivery_no IS NULL;
CREATE TABLE IF NOT EXISTS deliveries (
    no INTEGER PRIMARY KEY AUTOINCREMENT, task TEXT NOT NULL, request_id TEXT, meta_info TEXT NOT NULL,
    time REAL NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS deliveries_by_request ON deliveries (task, request_id) WHERE request_id IS NOT NULL;
CREATE TABLE IF NOT EXISTS finished (
    no INTEGER PRIMARY KEY AUTOINCREMENT, task TEXT NOT NULL, instance_id TEXT NOT NULL, group_no INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS finished_groups ON finished (group_no);
CREATE TABLE IF NOT EXISTS identity (one INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS runs (
    no INTEGER PRIMARY KEY AUTOINCREMENT, task TEXT NOT NULL, payload TEXT NOT NULL, finished_before INTEGER NOT NULL,
    state TEXT NOT NULL, error TEXT NOT NULL DEFAULT '', started REAL NOT NULL, ended REAL
);
"""

_CHANGING = ("count", "last_time", "accepting", "due")
_COLUMNS = f"no, task, key, instance_id, {', '.join(_CHANGING)}"
_values = attrgetter("no", "task", "key", "instance_json", *_CHANGING)


def _make_tables(connection: sqlite3.Connection) -> None:
    """Make what is missing; a database of the first version gets the columns that its groups lacked."""
    columns = {row[1] for row in connection.execute("PRAGMA table_info(groups)")}
    if columns and "count" not in columns:
        for column in _CHANGING:
            connection.execute(f"ALTER TABLE groups ADD COLUMN {column} NOT NULL DEFAULT {int(column == 'accepting')}")
        connection.execute("UPDATE groups SET count = (SELECT count(*) FROM items WHERE group_no = groups.no)")
    for statement in _SCHEMA.split(";"):
        connection.execute(statement)


def insert_many(connection: sqlite3.Connection, into: str, rows: Sequence[Sequence[Any]], tail: str = "") -> None:
    """Few statements for many rows: each statement lets go of the interpreter lock and has to wait to get it back."""
    for start in range(0, len(rows), 100):  # 100 rows stay below every limit on variables
        chunk = rows[start : start + 100]
        marks = ", ".join([f"({', '.join('?' * len(chunk[0]))})"] * len(chunk))
        connection.execute(f"INSERT INTO {into} VALUES {marks} {tail}", [value for row in chunk for value in row])


@dataclass(slots=True)
class StoredGroup:
    """A row of ``groups``. ``key`` is the JSON of its instance, or of its instance and ``group_id``."""

    no: int
    task: str
    key: str
    instance_json: str
    count: int = 0
    last_time: float = 0.0
    accepting: bool = True
    due: bool = False

    @property
    def instance_id(self) -> Any:
        return orjson.loads(self.instance_json)

    @property
    def place(self) -> dict[str, Any]:
        """What a generator is told of a part of a group; ``group_id`` is ``None`` when its items say none."""
        key = orjson.loads(self.key)
        group_id = key[1] if isinstance(key, list) else None
        return {"instance_id": self.instance_id, "group_id": group_id, "items": self.count}


@dataclass(frozen=True, slots=True)
class Batch:
    """What a reader gets: ``size`` processed items as JSON, one piece without brackets per group, and what is told."""

    size: int
    groups_json: list[bytes]
    meta_info: dict[str, Any]

    @property
    def data(self) -> list[dict[str, Any]]:
        return orjson.loads(b"[%s]" % b",".join(self.groups_json))


class GroupTable:
    """The groups, and what is done with their items as a whole; inside a transaction of the caller's."""

    def __init__(self, database: Database, ledger: Ledger) -> None:
        self._database = database
        self._ledger = ledger
        with database.transaction() as connection:
            _make_tables(connection)
            # numbers of groups are names that trainers keep: none is given twice
            used = "(SELECT max(no) AS no FROM groups UNION SELECT max(group_no) FROM finished)"
            self._next: int = 1 + self.one(f"SELECT coalesce(max(no), 0) FROM {used}")
            connection.execute("INSERT OR IGNORE INTO identity VALUES (1, ?)", (uuid.uuid4().hex[:12],))
            self._database_id: str = self.one("SELECT name FROM identity")

    def one(self, query: str) -> Any:
        return self._database.connection.execute(query).fetchone()[0]

    def where(self, condition: str, *values: Any) -> list[StoredGroup]:
        with self._database.reading() as connection:
            rows = connection.execute(f"SELECT {_COLUMNS} FROM groups WHERE {condition}", values)
            return [StoredGroup(*row) for row in rows]

    def accepting(self, keys: Iterable[str]) -> dict[tuple[str, str], StoredGroup]:
        """The groups that take items of these keys, by task type and key."""
        asked = list(keys)
        found: dict[tuple[str, str], StoredGroup] = {}
        for start in range(0, len(asked), 100):
            page = asked[start : start + 100]
            condition = f"key IN ({', '.join('?' * len(page))}) AND accepting AND delivery_no IS NULL"
            found |= {(group.task, group.key): group for group in self.where(condition, *page)}
        return found

    def new(self, task: str, key: str, instance_json: str) -> StoredGroup:
        """A group that ``save`` will store."""
        self._next += 1
        return StoredGroup(self._next - 1, task, key, instance_json)

    def save(self, groups: Iterable[StoredGroup]) -> None:
        update = ", ".join(f"{name} = excluded.{name}" for name in _CHANGING)
        tail = f"ON CONFLICT (no) DO UPDATE SET {update}"
        insert_many(self._database.connection, f"groups ({_COLUMNS})", [_values(group) for group in groups], tail)

    def rollouts_of(self, group: StoredGroup) -> list[str]:
        query = "SELECT rollout_id FROM items WHERE group_no = ? ORDER BY no"
        return [row[0] for row in self._database.connection.execute(query, (group.no,))]

    def move_last(self, group: StoredGroup, target: StoredGroup) -> None:
        """The last items of ``group`` become those of ``target``."""
        last = "SELECT no FROM items WHERE group_no = ? ORDER BY no DESC LIMIT ?"
        query = f"UPDATE items SET group_no = ? WHERE no IN ({last})"
        self._database.connection.execute(query, (target.no, group.no, target.count))

    def drop(self, group: StoredGroup) -> None:
        self._database.connection.execute("DELETE FROM items WHERE group_no = ?", (group.no,))
        self._database.connection.execute("DELETE FROM groups WHERE no = ?", (group.no,))

    def close(self, groups: Sequence[StoredGroup], outcome: Outcome, reason: str = "") -> int:
        """The end of these groups: their items have the outcome, but for those that had one before."""
        for group in groups:
            self._ledger.close_many(self.rollouts_of(group), outcome, reason)
            self.drop(group)
        return len(groups)

    def name(self, group: StoredGroup) -> str:
        """What trainers call the group: no other has this name, in this database or another."""
        return f"{self._database_id}:{group.no}"

    def trained(self, groups: Sequence[StoredGroup]) -> int:
        return self.close(groups, Outcome.TRAINED)

    def trim(self, keep: int) -> None:
        """Deliveries beyond the window can no longer be asked for again."""
        newest = "delivery_no IS NOT NULL ORDER BY delivery_no DESC, no DESC LIMIT -1 OFFSET ?"
        if self.trained(self.where(newest, keep)):
            oldest = "SELECT min(delivery_no) FROM groups WHERE delivery_no IS NOT NULL"
            self._database.connection.execute(f"DELETE FROM deliveries WHERE no < coalesce(({oldest}), no + 1)")

    def discard(self, task: str) -> int:
        """End all groups of a task type; returns how many of their items were not delivered."""
        with self._database.transaction() as connection:
            self.trained(self.where("task = ? AND delivery_no IS NOT NULL", task))
            waiting = self.where("task = ?", task)
            self.close(waiting, Outcome.CANCELLED, "replaced")
            for table in ("deliveries", "finished"):
                connection.execute(f"DELETE FROM {table} WHERE task = ?", (task,))
        return sum(group.count for group in waiting)

    def resume(
        self, task: str, trained_instances: Iterable[Any], trained_groups: Iterable[str] | None
    ) -> list[StoredGroup]:
        """A trainer starts and says what it has trained; what was delivered and it does not name is due again, and
        returned. ``trained_groups`` are ``buffer_group`` names. A trainer that does not keep those is understood by
        ``trained_instances``, each named as often as it was finished, less what it named at its last start and what was
        acknowledged or refused since."""
        trained: list[StoredGroup] = []
        lost: list[StoredGroup] = []
        with self._database.transaction() as connection:
            names = None if trained_groups is None else set(trained_groups)
            left = self._trained_since_start(task, trained_instances) if names is None else Counter[str]()
            for group in self.where("delivery_no IS NOT NULL AND task = ? ORDER BY delivery_no, no", task):
                known = left[group.instance_json] > 0 if names is None else self.name(group) in names
                left[group.instance_json] -= known
                (trained if known else lost).append(group)
            self.trained(trained)
            for group in lost:
                self._ledger.reopen_many(self.rollouts_of(group))
                connection.execute("UPDATE groups SET delivery_no = NULL, due = 1 WHERE no = ?", (group.no,))
                connection.execute("DELETE FROM finished WHERE group_no = ?", (group.no,))
            connection.execute("DELETE FROM deliveries WHERE task = ?", (task,))
        return lost

    def _trained_since_start(self, task: str, trained_instances: Iterable[Any]) -> Counter[str]:
        connection = self._database.connection
        trained = Counter(orjson.dumps(instance).decode() for instance in trained_instances)
        query = "SELECT payload, finished_before FROM runs WHERE task = ? ORDER BY no DESC LIMIT 1"
        payload, before = connection.execute(query, (task,)).fetchone() or ("{}", 0)
        named = orjson.loads(payload).get("skip_instance_ids") or ()
        trained.subtract(orjson.dumps(instance).decode() for instance in named)
        query = "SELECT instance_id FROM finished WHERE task = ? AND no > ? AND group_no NOT IN (SELECT no FROM groups)"
        trained.subtract(row[0] for row in connection.execute(query, (task, before)))
        return trained
