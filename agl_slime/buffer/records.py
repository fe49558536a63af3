"""The tables of the buffer's database, with operations on whole groups and on runs of generators."""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import orjson

from agl_slime.data.ledger import Ledger
from agl_slime.data.results import Outcome
from agl_slime.support.database import Database
from agl_slime.support.http import json_bytes, json_value

# ``accepting``: takes more items. ``due``: has enough items to be decided, and a new one since the last decision.
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
CREATE TABLE IF NOT EXISTS identity (no INTEGER PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS runs (
    no INTEGER PRIMARY KEY AUTOINCREMENT, task TEXT NOT NULL, payload TEXT NOT NULL, finished_before INTEGER NOT NULL,
    state TEXT NOT NULL, error TEXT NOT NULL DEFAULT '', started REAL NOT NULL, ended REAL
);
"""

_CHANGING = ("count", "last_time", "accepting", "due")
_COLUMNS = f"no, task, key, instance_id, {', '.join(_CHANGING)}"
_values = attrgetter("no", "task", "key", "instance_json", *_CHANGING)


def insert_many(connection: sqlite3.Connection, into: str, rows: Sequence[Sequence[Any]], tail: str = "") -> None:
    """Insert many rows by few statements: each statement releases the GIL and has to wait for it again."""
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
    def as_partial_group(self) -> dict[str, Any]:
        """The group as an entry of a generator's ``partial_groups``; ``group_id`` may be ``None``."""
        key = orjson.loads(self.key)
        group_id = key[1] if isinstance(key, list) else None
        return {"instance_id": self.instance_id, "group_id": group_id, "items": self.count}


class Records:
    """The database of a buffer. Thread-safe; ``clock`` returns seconds since the epoch."""

    def __init__(self, *, database: Database | None = None, clock: Callable[[], float] = time.time) -> None:
        self._database = database or Database()
        self._clock = clock
        self.ledger = Ledger(database=self._database)
        with self._database.transaction() as connection:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            # restart the wait for missing items: no one could write while the buffer was down
            connection.execute("UPDATE groups SET last_time = ? WHERE delivery_no IS NULL", (clock(),))
            # trainers keep numbers of groups as names: never reuse one
            used = "(SELECT max(no) AS no FROM groups UNION SELECT max(group_no) FROM finished)"
            self._next_group: int = 1 + self._scalar(f"SELECT coalesce(max(no), 0) FROM {used}")
            self._next_item: int = 1 + self._scalar("SELECT coalesce(max(no), 0) FROM items")
            connection.execute("INSERT OR IGNORE INTO identity VALUES (1, ?)", (uuid.uuid4().hex[:12],))
            self._database_id: str = self._scalar("SELECT name FROM identity")
        self._recount_items()

    def close(self) -> None:
        self._database.close()

    def _scalar(self, query: str) -> Any:
        return self._database.connection.execute(query).fetchone()[0]

    def _recount_items(self) -> None:
        """Count the items that are neither delivered nor refused; other methods keep the count current."""
        with self._database.reading():
            self.held_items: int = self._scalar("SELECT coalesce(sum(count), 0) FROM groups WHERE delivery_no IS NULL")

    # -- groups -------------------------------------------------------------------------------------------------------

    def _select(self, condition: str, *values: Any) -> list[StoredGroup]:
        with self._database.reading() as connection:
            rows = connection.execute(f"SELECT {_COLUMNS} FROM groups WHERE {condition}", values)
            return [StoredGroup(*row) for row in rows]

    def undecided(self, task: str) -> list[StoredGroup]:
        """The groups that wait for items or for a reader."""
        return self._select("task = ? AND delivery_no IS NULL ORDER BY last_time, no", task)

    def _new_group(self, task: str, key: str, instance_json: str) -> StoredGroup:
        """A group that ``_save`` will store."""
        self._next_group += 1
        return StoredGroup(self._next_group - 1, task, key, instance_json)

    def _save(self, groups: Iterable[StoredGroup]) -> None:
        update = ", ".join(f"{name} = excluded.{name}" for name in _CHANGING)
        tail = f"ON CONFLICT (no) DO UPDATE SET {update}"
        insert_many(self._database.connection, f"groups ({_COLUMNS})", [_values(group) for group in groups], tail)

    def _rollouts_of(self, group: StoredGroup) -> list[str]:
        query = "SELECT rollout_id FROM items WHERE group_no = ? ORDER BY no"
        return [row[0] for row in self._database.connection.execute(query, (group.no,))]

    def _drop(self, group: StoredGroup) -> None:
        self._database.connection.execute("DELETE FROM items WHERE group_no = ?", (group.no,))
        self._database.connection.execute("DELETE FROM groups WHERE no = ?", (group.no,))

    def _name(self, group: StoredGroup) -> str:
        """The group's name for trainers, unique across databases."""
        return f"{self._database_id}:{group.no}"

    def _end(self, groups: Sequence[StoredGroup], outcome: Outcome = Outcome.TRAINED, reason: str = "") -> int:
        """Close the items of these groups with an outcome, unless they have one, and drop the groups."""
        for group in groups:
            self.ledger.close_many(self._rollouts_of(group), outcome, reason)
            self._drop(group)
        return len(groups)

    # -- deliveries ---------------------------------------------------------------------------------------------------

    def acknowledge(self, task: str, request_ids: Iterable[str]) -> int:
        """Count the items delivered to these requests as trained. Returns the number of groups."""
        delivered = "task = ? AND request_id IN (SELECT value FROM json_each(?))"
        with self._database.transaction():
            ids = orjson.dumps([*request_ids]).decode()
            return self._end(self._select(f"delivery_no IN (SELECT no FROM deliveries WHERE {delivered})", task, ids))

    def _trim(self, keep: int) -> None:
        """Count deliveries beyond the newest ``keep`` groups as trained; they can no longer be requested again."""
        newest = "delivery_no IS NOT NULL ORDER BY delivery_no DESC, no DESC LIMIT -1 OFFSET ?"
        if self._end(self._select(newest, keep)):
            oldest = "SELECT min(delivery_no) FROM groups WHERE delivery_no IS NOT NULL"
            self._database.connection.execute(f"DELETE FROM deliveries WHERE no < coalesce(({oldest}), no + 1)")

    def discard(self, task: str) -> None:
        """Forget all groups of a task type: delivered ones count as trained, others as cancelled."""
        with self._database.transaction() as connection:
            self._end(self._select("task = ? AND delivery_no IS NOT NULL", task))
            self._end(self._select("task = ?", task), Outcome.CANCELLED, "replaced")
            for table in ("deliveries", "finished"):
                connection.execute(f"DELETE FROM {table} WHERE task = ?", (task,))
        self._recount_items()

    def resume(self, task: str, trained_instances: Iterable[Any], trained_groups: Iterable[str] | None = None) -> int:
        """Resume a trainer: delivered groups that it has not trained become due again. Returns their number.

        ``trained_groups`` are ``buffer_group`` names. For a trainer that does not keep these, ``trained_instances``
        count: each as often as it was finished, minus the ones given at its last start, and acknowledged or refused
        since."""
        trained: list[StoredGroup] = []
        untrained: list[StoredGroup] = []
        with self._database.transaction() as connection:
            names = None if trained_groups is None else set(trained_groups)
            counts = self._trained_since_start(task, trained_instances) if names is None else Counter[str]()
            for group in self._select("delivery_no IS NOT NULL AND task = ? ORDER BY delivery_no, no", task):
                is_trained = counts[group.instance_json] > 0 if names is None else self._name(group) in names
                counts[group.instance_json] -= is_trained
                (trained if is_trained else untrained).append(group)
            self._end(trained)
            for group in untrained:
                self.ledger.reopen_many(self._rollouts_of(group))
                connection.execute("UPDATE groups SET delivery_no = NULL, due = 1 WHERE no = ?", (group.no,))
                connection.execute("DELETE FROM finished WHERE group_no = ?", (group.no,))
            connection.execute("DELETE FROM deliveries WHERE task = ?", (task,))
        self._recount_items()
        return len(untrained)

    def _trained_since_start(self, task: str, trained_instances: Iterable[Any]) -> Counter[str]:
        connection = self._database.connection
        trained = Counter(orjson.dumps(instance).decode() for instance in trained_instances)
        query = "SELECT payload, finished_before FROM runs WHERE task = ? ORDER BY no DESC LIMIT 1"
        payload, finished_before = connection.execute(query, (task,)).fetchone() or ("{}", 0)
        earlier = json_value(payload.encode()).get("skip_instance_ids") or ()
        trained.subtract(orjson.dumps(instance).decode() for instance in earlier)
        query = "SELECT instance_id FROM finished WHERE task = ? AND no > ? AND group_no NOT IN (SELECT no FROM groups)"
        trained.subtract(row[0] for row in connection.execute(query, (task, finished_before)))
        return trained

    # -- runs of generators -------------------------------------------------------------------------------------------

    def start_run(self, task: str, payload: Mapping[str, Any]) -> int:
        """Record the start of a generator, which replaces a running one of the task type. Returns the run's number."""
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE runs SET state = 'replaced', ended = ? WHERE task = ? AND state = 'running'",
                (self._clock(), task),
            )
            finished = self._scalar("SELECT coalesce(max(no), 0) FROM finished")
            cursor = connection.execute(
                "INSERT INTO runs (task, payload, finished_before, state, started) VALUES (?, ?, ?, 'running', ?)",
                (task, json_bytes(payload).decode(), finished, self._clock()),
            )
            return int(cursor.lastrowid or 0)

    def end_run(self, no: int, state: str, error: str = "") -> None:
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE runs SET state = ?, error = ?, ended = ? WHERE no = ? AND state = 'running'",
                (state, error, self._clock(), no),
            )

    def latest_runs(self) -> dict[str, dict[str, Any]]:
        """The latest run of each task type: its row, with ``payload`` decoded."""
        names = ("no", "payload", "state", "error", "started", "ended")
        latest = "SELECT max(no) FROM runs GROUP BY task"
        query = f"SELECT task, {', '.join(names)} FROM runs WHERE no IN ({latest})"
        with self._database.reading() as connection:
            rows = {row[0]: dict(zip(names, row[1:], strict=True)) for row in connection.execute(query)}
        return {task: {**row, "payload": json_value(row["payload"].encode())} for task, row in rows.items()}

    def finished_since(self, run_no: int) -> list[Any]:
        """The instances that were finished since this run started, each as often as it was."""
        query = (
            "SELECT instance_id FROM finished JOIN runs USING (task) "
            "WHERE runs.no = ? AND finished.no > finished_before ORDER BY finished.no"
        )
        with self._database.reading() as connection:
            return [orjson.loads(row[0]) for row in connection.execute(query, (run_no,))]
