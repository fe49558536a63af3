"""The ledger: the state of each rollout, and counts that add up at any moment, after any crash.

A rollout is *open* (in flight), *ready* (its group waits to be trained on) or *closed* with one outcome. The ledger is
an SQLite database, in a file or in memory; every call is one transaction, and its cost does not depend on the length of
the run. Old closed rollouts are only counted; the newest ids are kept to recognise late and repeated reports.

``checkpoint`` ties the ledger to a checkpoint of the trainer, and ``resume`` undoes the training after it, which a
resumed trainer has forgotten.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from agl_slime.data.results import Outcome
from agl_slime.errors import ConfigError
from agl_slime.support.database import Database

# Closed rollouts whose ids are kept; ids since the oldest kept checkpoint are always kept.
_KEPT_CLOSED = 100_000
_FORGET_EVERY = 1_000
_KEPT_CHECKPOINTS = 16

_OPEN, _READY = 0, 1
_STATES = ("open", "ready")
# Many ids as one parameter: one SQLite step, one release of the GIL.
_AMONG = "rollout_id IN (SELECT value FROM json_each(?))"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS ledger_rollouts (
    rollout_id TEXT PRIMARY KEY, instance_id TEXT, state INTEGER NOT NULL, outcome TEXT, reason TEXT, closed_no INTEGER
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS ledger_unfinished ON ledger_rollouts (state) WHERE state < 2;
CREATE INDEX IF NOT EXISTS ledger_closed ON ledger_rollouts (closed_no) WHERE state = 2;
CREATE TABLE IF NOT EXISTS ledger_counts (
    kind TEXT, reason TEXT, n INTEGER NOT NULL, PRIMARY KEY (kind, reason)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ledger_finished (
    no INTEGER PRIMARY KEY, instance_id TEXT NOT NULL, closed_no INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS ledger_checkpoints (step INTEGER PRIMARY KEY, closed_no INTEGER NOT NULL);
"""


@dataclass(frozen=True, slots=True)
class LedgerCounts:
    """Counts of rollouts: ``opened == open + ready + sum(closed.values())``; ``reasons`` are by outcome and reason."""

    opened: int
    open: int
    ready: int
    closed: dict[Outcome, int]
    reasons: dict[tuple[Outcome, str], int]


def ledger_checkpoints(path: Path) -> set[int]:
    """The steps of the checkpoints in the ledger file; empty without a file."""
    if not path.is_file():
        return set()
    database = Database(path=path)
    try:
        with database.reading() as connection:
            return {step for (step,) in connection.execute("SELECT step FROM ledger_checkpoints")}
    except sqlite3.Error as error:
        raise ConfigError(f"the ledger {path} cannot be read: {error}; put the file of this run back") from error
    finally:
        database.close()


class Ledger:
    """A ledger in memory, in a file (``path``), or in a ``Database`` whose transactions it joins. Thread-safe. A
    rollout may have an *instance* (task), which can be finished several times (epochs). An existing file is continued:
    rollouts that were open or ready when the process died still are."""

    def __init__(self, *, path: Path | str | None = None, database: Database | None = None) -> None:
        self._database = database or Database(path=path)
        self._owns_database = database is None
        with self._database.transaction() as connection:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
        self.on_disk = self._database.path is not None
        self._read_open()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """One transaction for all calls inside: cheaper, and atomic."""
        try:
            with self._database.transaction():
                yield
        except BaseException:
            self._read_open()
            raise

    def open_many(self, rollouts: Sequence[tuple[str, str | None]]) -> int:
        """Open these rollouts, given as pairs of rollout and instance; returns how many were new."""
        with self._database.transaction() as connection:
            opened = connection.execute(
                "INSERT OR IGNORE INTO ledger_rollouts (rollout_id, instance_id, state)"
                " SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), 0 FROM json_each(?)",
                (json.dumps(rollouts),),
            ).rowcount
            self._add(("opened", "", opened), ("open", "", opened))
            if opened == len(rollouts):
                self._open.update(rollout_id for rollout_id, _ in rollouts)
            elif opened:
                self._read_open()
        return opened

    def ready_many(self, rollout_ids: Sequence[str]) -> int:
        """Move open rollouts to ready; returns how many were open."""
        return self._move(rollout_ids, _OPEN, _READY)

    def reopen_many(self, rollout_ids: Sequence[str]) -> int:
        """Move ready rollouts back to open (their delivery was lost); returns how many were ready."""
        moved = self._move(rollout_ids, _READY, _OPEN)
        self._read_open()
        return moved

    def close_many(self, rollout_ids: Sequence[str], outcome: Outcome, reason: str = "") -> int:
        """Close open or ready rollouts with an outcome; returns how many were not closed before."""
        with self._database.transaction() as connection:
            last = self._closed_no()
            number = last + len(rollout_ids)  # rollouts that close together share one number
            change = "state = 2, outcome = ?, reason = ?, closed_no = ?"
            values = outcome.value, reason, number
            open_ids = [rollout_id for rollout_id in rollout_ids if rollout_id in self._open]
            ready_ids = [rollout_id for rollout_id in rollout_ids if rollout_id not in self._open]
            moved = [self._update(change, values, f"state = {_OPEN}", open_ids)]
            moved.append(self._update(change, values, f"state = {_READY}", ready_ids))
            self._open.difference_update(open_ids)
            closed = sum(moved)
            self._add(*((name, "", -n) for name, n in zip(_STATES, moved, strict=True)))
            self._add((f"closed:{outcome.value}", reason, closed), ("closed_no", "", len(rollout_ids)))
            if last // _FORGET_EVERY != number // _FORGET_EVERY:
                [(oldest,)] = self._ask("SELECT min(closed_no) FROM ledger_checkpoints")
                limit = min(number - _KEPT_CLOSED, number if oldest is None else oldest)
                connection.execute("DELETE FROM ledger_rollouts WHERE state = 2 AND closed_no <= ?", (limit,))
        return closed

    def filter_trained(self, rollout_ids: Sequence[str], reason: str) -> int:
        """Move delivered rollouts that were not trained on to filtered, for ``reason``. Returns how many."""
        with self._database.transaction():
            trained = "state = 2 AND outcome = 'trained' AND reason = ''"
            moved = self._update("outcome = 'filtered', reason = ?", (reason,), trained, rollout_ids)
            self._add(("closed:trained", "", -moved), ("closed:filtered", reason, moved))
        return moved

    def remember(self, rollout_ids: Iterable[str]) -> None:
        """Recognise later reports of these rollouts, which another ledger of the run closed, without counting them."""
        query = "INSERT OR IGNORE INTO ledger_rollouts (rollout_id, state, closed_no) VALUES (?, 2, ?)"
        with self._database.transaction() as connection:
            number = self._closed_no()
            connection.executemany(query, [(rollout_id, number) for rollout_id in rollout_ids])

    def carry_over(self, closed: Iterable[tuple[Outcome, str, int]]) -> None:
        """Add counts of rollouts that closed before the restart: outcome, reason and number."""
        with self._database.transaction():
            for outcome, reason, n in closed:
                self._add(("opened", "", n), (f"closed:{outcome.value}", reason, n))

    def is_open(self, rollout_id: str) -> bool:
        """Whether the rollout is in flight."""
        return rollout_id in self._open

    def has_ended(self, rollout_id: str) -> bool:
        """Whether the rollout is ready or closed; ``False`` for an old id that is no longer kept."""
        query = "SELECT 1 FROM ledger_rollouts WHERE rollout_id = ? AND state > 0"
        return rollout_id not in self._open and bool(self._ask(query, rollout_id))

    def instances_of(self, rollout_ids: Sequence[str]) -> dict[str, str | None]:
        """The instances of the given rollouts; rollouts that are not in the ledger, or no longer kept, are missing."""
        query = f"SELECT rollout_id, instance_id FROM ledger_rollouts WHERE {_AMONG}"
        return dict(self._ask(query, json.dumps([*rollout_ids])))

    def open_ids(self) -> list[str]:
        return list(self._open)

    def recent_ids(self) -> list[str]:
        """The kept ids of closed rollouts, in the order in which they closed."""
        query = "SELECT rollout_id FROM ledger_rollouts WHERE state = 2 ORDER BY closed_no"
        return [rollout_id for (rollout_id,) in self._ask(query)]

    def outcome_of(self, rollout_id: str) -> tuple[Outcome, str] | None:
        """The rollout's outcome and reason; ``None`` while it is not closed, or when it is no longer kept."""
        query = "SELECT outcome, reason FROM ledger_rollouts WHERE rollout_id = ? AND outcome IS NOT NULL"
        rows = self._ask(query, rollout_id)
        return (Outcome(rows[0][0]), rows[0][1]) if rows else None

    def counts(self) -> LedgerCounts:
        plain = dict.fromkeys(("opened", *_STATES), 0)
        closed: dict[Outcome, int] = {}
        reasons: dict[tuple[Outcome, str], int] = {}
        for kind, reason, n in self._ask("SELECT kind, reason, n FROM ledger_counts WHERE n <> 0"):
            if kind in plain:
                plain[kind] = n
            elif kind.startswith("closed:"):
                outcome = Outcome(kind.removeprefix("closed:"))
                closed[outcome] = closed.get(outcome, 0) + n
                reasons[outcome, reason] = n
        return LedgerCounts(**plain, closed=closed, reasons=reasons)

    def finish_instance(self, instance_id: str) -> None:
        """Note that a group of this instance is finished: a resumed run skips the instance once per call."""
        query = "INSERT INTO ledger_finished (instance_id, closed_no) VALUES (?, ?)"
        with self._database.transaction() as connection:
            connection.execute(query, (instance_id, self._closed_no()))

    def finished_instances(self) -> list[str]:
        """The finished instances, oldest first, each as often as it was finished: slime's ``skip_instance_ids``."""
        return [row[0] for row in self._ask("SELECT instance_id FROM ledger_finished ORDER BY no")]

    def checkpoint(self, step: int) -> None:
        """Note that the trainer's checkpoint of ``step`` contains everything closed so far."""
        with self._database.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO ledger_checkpoints VALUES (?, ?)", (step, self._closed_no()))
            connection.execute(
                "DELETE FROM ledger_checkpoints WHERE step NOT IN"
                " (SELECT step FROM ledger_checkpoints ORDER BY closed_no DESC, step DESC LIMIT ?)",
                (_KEPT_CHECKPOINTS,),
            )

    def resume(self, step: int, *, ready: Collection[str], reported: Collection[str] | None = None) -> int:
        """Return to the trainer's checkpoint of ``step`` in a new process whose data source has only the rollouts
        ``ready``. Rollouts that were trained after the checkpoint, dropped rollouts of instances that are not
        among ``reported`` (``None``: all are), and all other unfinished rollouts are cancelled as ``restarted``, to be
        run again; their instances are no longer finished. Returns the number of cancelled rollouts. Raises
        ``ConfigError`` when the checkpoint is not among the last ones."""
        with self._database.transaction() as connection:
            row = connection.execute("SELECT closed_no FROM ledger_checkpoints WHERE step = ?", (step,)).fetchone()
            if row is None:
                steps = [str(number) for (number,) in self._ask("SELECT step FROM ledger_checkpoints ORDER BY step")]
                raise ConfigError(f"the ledger has no checkpoint of step {step}, only {', '.join(steps) or 'none'}")
            query = "SELECT DISTINCT instance_id FROM ledger_rollouts WHERE outcome = 'trained' AND closed_no <= ?"
            trained = {instance_id for (instance_id,) in self._ask(query, *row)}
            unreported = set() if reported is None else {*self.finished_instances()} - {*reported} - trained
            named = json.dumps(sorted(unreported))
            dropped = "outcome IN ('filtered', 'failed', 'stale') AND instance_id IN (SELECT value FROM json_each(?))"
            condition = f"state = 2 AND (outcome = 'trained' AND closed_no > ? OR {dropped})"
            query = "SELECT instance_id, outcome, reason, count(*) FROM ledger_rollouts"
            undone = self._ask(f"{query} WHERE {condition} GROUP BY 1, 2, 3", *row, named)
            change = "state = 0, outcome = NULL, reason = NULL, closed_no = NULL"
            connection.execute(f"UPDATE ledger_rollouts SET {change} WHERE {condition}", (*row, named))
            self._add(("open", "", sum(n for *_, n in undone)))
            self._add(*((f"closed:{outcome}", reason, -n) for _, outcome, reason, n in undone))
            instances = {instance_id for instance_id, *_ in undone if instance_id is not None}
            limits = [(instance_id, -1 if instance_id in unreported else row[0]) for instance_id in instances]
            connection.executemany("DELETE FROM ledger_finished WHERE instance_id = ? AND closed_no > ?", limits)
            connection.execute("DELETE FROM ledger_checkpoints WHERE closed_no > ? OR step > ?", (*row, step))
            self._read_open()
            unfinished = [row[0] for row in self._ask("SELECT rollout_id FROM ledger_rollouts WHERE state < 2")]
            ready = set(ready)
            self.ready_many([rollout_id for rollout_id in unfinished if rollout_id in ready])
            lost = [rollout_id for rollout_id in unfinished if rollout_id not in ready]
            return self.close_many(lost, Outcome.CANCELLED, "restarted")

    def close(self) -> None:
        """Close the database, unless it was passed in."""
        if self._owns_database:
            self._database.close()

    def _ask(self, query: str, *values: object) -> list[tuple]:
        with self._database.reading() as connection:
            return connection.execute(query, values).fetchall()

    def _read_open(self) -> None:
        # cached: each SQLite statement releases the GIL
        rows = self._ask("SELECT rollout_id FROM ledger_rollouts WHERE state = 0 AND state < 2")
        self._open = {rollout_id for (rollout_id,) in rows}

    def _closed_no(self) -> int:
        """The number of the last closed rollout."""
        return next((n for (n,) in self._ask("SELECT n FROM ledger_counts WHERE kind = 'closed_no'")), 0)

    def _update(self, change: str, values: Sequence[object], condition: str, rollout_ids: Sequence[str]) -> int:
        """Change the rollouts among ``rollout_ids`` that match ``condition``; returns how many."""
        if not rollout_ids:
            return 0
        query = f"UPDATE ledger_rollouts SET {change} WHERE {condition} AND {_AMONG}"
        return self._database.connection.execute(query, (*values, json.dumps([*rollout_ids]))).rowcount

    def _move(self, rollout_ids: Sequence[str], origin: int, target: int) -> int:
        with self._database.transaction():
            moved = self._update("state = ?", (target,), f"state = {origin}", rollout_ids)
            self._open.difference_update(rollout_ids if target == _READY else ())
            self._add((_STATES[origin], "", -moved), (_STATES[target], "", moved))
        return moved

    def _add(self, *counts: tuple[str, str, int]) -> None:
        changed = [count for count in counts if count[2]]
        if changed:  # one statement: each releases the GIL
            rows = ", ".join(["(?, ?, ?)"] * len(changed))
            conflict = "ON CONFLICT (kind, reason) DO UPDATE SET n = n + excluded.n"
            self._database.connection.execute(f"INSERT INTO ledger_counts VALUES {rows} {conflict}", [*chain(*changed)])
