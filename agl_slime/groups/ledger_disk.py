"""The ledger on disk: the same account as ``Ledger``, in SQLite, right after any crash.

Every call is one transaction, so what is on disk always adds up. ``checkpoint`` ties the account to a checkpoint of the
trainer, and ``rewind`` takes back what was trained after it: a resumed trainer has forgotten those steps, so their
rollouts are in flight again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from agl_slime.errors import ConfigError
from agl_slime.groups.ledger import LedgerCounts
from agl_slime.groups.results import Outcome
from agl_slime.support.database import Database

T = TypeVar("T")

# Closed rollouts that are remembered by id, to recognise late and repeated reports; those since the oldest kept
# checkpoint are always remembered.
_REMEMBERED_CLOSED = 100_000
_KEPT_CHECKPOINTS = 16

_OPEN, _READY, _CLOSED = 0, 1, 2
_STATES = ("open", "ready")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS ledger_rollouts (
    rollout_id TEXT PRIMARY KEY, instance_id TEXT, state INTEGER NOT NULL, outcome TEXT, reason TEXT, closed_no INTEGER
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS ledger_unfinished ON ledger_rollouts (state) WHERE state < 2;
CREATE INDEX IF NOT EXISTS ledger_closed ON ledger_rollouts (closed_no) WHERE state = 2;
CREATE TABLE IF NOT EXISTS ledger_counts (kind TEXT, reason TEXT, n INTEGER NOT NULL, PRIMARY KEY (kind, reason)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS ledger_finished (no INTEGER PRIMARY KEY, instance_id TEXT NOT NULL, closed_no INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS ledger_checkpoints (step INTEGER PRIMARY KEY, closed_no INTEGER NOT NULL);
"""


class PersistentLedger:
    """A drop-in for ``Ledger``. Give it a file of its own (``path``), or a ``Database`` whose transactions it joins.

    Opening an existing file continues its account: rollouts that were open or ready when the process died still are.
    The owner asks ``instances_in_flight`` what to enqueue again and closes the old rollouts, or hands them out if it
    kept them.
    """

    def __init__(
        self, *, path: Path | str | None = None, database: Database | None = None, remembered: int = _REMEMBERED_CLOSED
    ) -> None:
        if path is not None and database is not None:
            raise ConfigError("PersistentLedger takes a path or a database, not both")
        self._database = database or Database(path=path)
        self._owns_database = database is None
        self._remembered = remembered
        with self._database.transaction() as connection:
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            row = connection.execute("SELECT n FROM ledger_counts WHERE kind = 'closed_no'").fetchone()
            self._closed_no: int = row[0] if row else 0

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Calls inside share one transaction: cheaper, and kept or lost together."""
        closed_no = self._closed_no
        try:
            with self._database.transaction():
                yield
        except BaseException:
            self._closed_no = closed_no
            raise

    # -- a rollout's way ----------------------------------------------------------------------------------------------

    def open(self, rollout_id: str, *, instance_id: str | None = None) -> bool:
        """A rollout is in flight. ``False`` when it is known already."""
        return self.open_many([(rollout_id, instance_id)]) == 1

    def ready(self, rollout_id: str) -> bool:
        """An open rollout waits to be trained on. ``False`` when it was not open."""
        return self.ready_many([rollout_id]) == 1

    def reopen(self, rollout_id: str) -> bool:
        """A ready rollout is in flight again (its hand-out was lost). ``False`` when it was not ready."""
        return self.reopen_many([rollout_id]) == 1

    def close(self, rollout_id: str, outcome: Outcome, reason: str = "") -> bool:
        """An open or ready rollout has reached its one end. ``False`` when it had ended before or was never opened."""
        return self.close_many([rollout_id], outcome, reason) == 1

    # -- many at once -------------------------------------------------------------------------------------------------

    def open_many(self, rollouts: Sequence[tuple[str, str | None]]) -> int:
        """``open`` for pairs of rollout and instance; returns how many were new."""
        opened = 0
        with self._database.transaction() as connection:
            for chunk in _chunks(rollouts):
                values = ", ".join("(?, ?, 0)" for _ in chunk)
                flat = [value for pair in chunk for value in pair]
                opened += connection.execute(
                    f"INSERT OR IGNORE INTO ledger_rollouts (rollout_id, instance_id, state) VALUES {values}", flat
                ).rowcount
            self._add("opened", "", opened)
            self._add("open", "", opened)
        return opened

    def ready_many(self, rollout_ids: Sequence[str]) -> int:
        """``ready`` for many; returns how many were open."""
        return self._move_many(rollout_ids, _OPEN, _READY)

    def reopen_many(self, rollout_ids: Sequence[str]) -> int:
        """``reopen`` for many; returns how many were ready."""
        return self._move_many(rollout_ids, _READY, _OPEN)

    def close_many(self, rollout_ids: Sequence[str], outcome: Outcome, reason: str = "") -> int:
        """``close`` for many, with one outcome; returns how many had not ended before."""
        closed = 0
        with self.batch(), self._database.transaction() as connection:
            before = self._closed_no
            self._closed_no += len(rollout_ids)  # they end together: one place in the order
            for state in (_OPEN, _READY):
                moved = 0
                for chunk in _chunks(rollout_ids):
                    where = f"state = ? AND rollout_id IN ({_marks(chunk)})"
                    query = (
                        f"UPDATE ledger_rollouts SET state = 2, outcome = ?, reason = ?, closed_no = ? WHERE {where}"
                    )
                    moved += connection.execute(query, (outcome.value, reason, self._closed_no, state, *chunk)).rowcount
                self._add(_STATES[state], "", -moved)
                closed += moved
            self._add(f"closed:{outcome.value}", reason, closed)
            self._add("closed_no", "", len(rollout_ids))
            if before // 1000 != self._closed_no // 1000:
                self._forget()
        return closed

    def known_among(self, rollout_ids: Sequence[str]) -> dict[str, str | None]:
        """Those that were ever opened, as far as is remembered, with their instances."""
        known: dict[str, str | None] = {}
        with self._database.reading() as connection:
            for chunk in _chunks(rollout_ids):
                query = f"SELECT rollout_id, instance_id FROM ledger_rollouts WHERE rollout_id IN ({_marks(chunk)})"
                known.update(connection.execute(query, chunk).fetchall())
        return known

    # -- questions ----------------------------------------------------------------------------------------------------

    def is_open(self, rollout_id: str) -> bool:
        """Whether the rollout is in flight."""
        with self._database.reading() as connection:
            return (
                connection.execute(
                    "SELECT 1 FROM ledger_rollouts WHERE rollout_id = ? AND state = 0", (rollout_id,)
                ).fetchone()
                is not None
            )

    def is_known(self, rollout_id: str) -> bool:
        """Whether the rollout was ever opened, as far as is remembered."""
        with self._database.reading() as connection:
            return (
                connection.execute("SELECT 1 FROM ledger_rollouts WHERE rollout_id = ?", (rollout_id,)).fetchone()
                is not None
            )

    def open_ids(self) -> list[str]:
        """The rollouts in flight."""
        with self._database.reading() as connection:
            return [
                row[0]
                for row in connection.execute("SELECT rollout_id FROM ledger_rollouts WHERE state = 0 AND state < 2")
            ]

    def recent_ids(self) -> list[str]:
        """Closed rollouts that are still remembered by id, in the order in which they ended."""
        with self._database.reading() as connection:
            return [
                row[0]
                for row in connection.execute(
                    "SELECT rollout_id FROM ledger_rollouts WHERE state = 2 ORDER BY closed_no"
                )
            ]

    def remember(self, rollout_ids: Iterable[str]) -> None:
        """These closed in another account of the run: they are not counted here, and reports of them are recognised as
        late."""
        query = "INSERT OR IGNORE INTO ledger_rollouts (rollout_id, state, closed_no) VALUES (?, 2, ?)"
        with self._database.transaction() as connection:
            connection.executemany(query, [(rollout_id, self._closed_no) for rollout_id in rollout_ids])

    def outcome_of(self, rollout_id: str) -> tuple[Outcome, str] | None:
        """How the rollout ended, with its reason; ``None`` while it has not, or when it is no longer remembered."""
        with self._database.reading() as connection:
            query = (
                "SELECT outcome, reason FROM ledger_rollouts WHERE rollout_id = ? AND state = 2 AND outcome IS NOT NULL"
            )
            row = connection.execute(query, (rollout_id,)).fetchone()
        return (Outcome(row[0]), row[1]) if row else None

    def counts(self) -> LedgerCounts:
        with self._database.reading() as connection:
            rows = connection.execute("SELECT kind, reason, n FROM ledger_counts WHERE n <> 0").fetchall()
        plain = {kind: n for kind, _, n in rows if kind in ("opened", *_STATES)}
        closed: dict[Outcome, int] = {}
        reasons: dict[tuple[Outcome, str], int] = {}
        for kind, reason, n in rows:
            if kind.startswith("closed:"):
                outcome = Outcome(kind.removeprefix("closed:"))
                closed[outcome] = closed.get(outcome, 0) + n
                reasons[outcome, reason] = n
        return LedgerCounts(plain.get("opened", 0), plain.get("open", 0), plain.get("ready", 0), closed, reasons)

    # -- instances ----------------------------------------------------------------------------------------------------

    def finish_instance(self, instance_id: str) -> None:
        """A group of this instance has been dealt with: a resumed run skips it, once per time said."""
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT INTO ledger_finished (instance_id, closed_no) VALUES (?, ?)", (instance_id, self._closed_no)
            )

    def finished_instances(self) -> list[str]:
        """The finished instances, oldest first, each as often as it was finished: what slime calls
        ``skip_instance_ids``."""
        with self._database.reading() as connection:
            return [row[0] for row in connection.execute("SELECT instance_id FROM ledger_finished ORDER BY no")]

    def instances_in_flight(self) -> list[str]:
        """The instances that have open or ready rollouts, each once: what a resumed run must enqueue again."""
        query = "SELECT DISTINCT instance_id FROM ledger_rollouts WHERE state < 2 AND instance_id IS NOT NULL"
        with self._database.reading() as connection:
            return [row[0] for row in connection.execute(query)]

    # -- checkpoints of the trainer -----------------------------------------------------------------------------------

    def checkpoint(self, step: int) -> None:
        """The trainer's checkpoint of ``step`` holds all that is closed now."""
        with self._database.transaction() as connection:
            connection.execute("INSERT OR REPLACE INTO ledger_checkpoints VALUES (?, ?)", (step, self._closed_no))
            connection.execute(
                "DELETE FROM ledger_checkpoints WHERE step NOT IN (SELECT step FROM ledger_checkpoints ORDER BY closed_no DESC, step DESC LIMIT ?)",
                (_KEPT_CHECKPOINTS,),
            )

    def rewind(self, step: int) -> list[str]:
        """The trainer resumed from its checkpoint of ``step``: what was trained after it is in flight again, and its
        instances are not finished any more. Returns the rollouts. Raises ``ConfigError`` when that checkpoint is not
        among the last ones."""
        with self._database.transaction() as connection:
            row = connection.execute("SELECT closed_no FROM ledger_checkpoints WHERE step = ?", (step,)).fetchone()
            if row is None:
                known = [
                    str(known_step)
                    for (known_step,) in connection.execute("SELECT step FROM ledger_checkpoints ORDER BY step")
                ]
                raise ConfigError(f"the ledger knows no checkpoint of step {step}; it has {', '.join(known) or 'none'}")
            where = "state = 2 AND outcome = 'trained' AND closed_no > ?"
            undone = connection.execute(
                f"SELECT rollout_id, instance_id, reason FROM ledger_rollouts WHERE {where}", row
            ).fetchall()
            connection.execute(
                f"UPDATE ledger_rollouts SET state = 0, outcome = NULL, reason = NULL, closed_no = NULL WHERE {where}",
                row,
            )
            for _, _, reason in undone:
                self._add(f"closed:{Outcome.TRAINED.value}", reason, -1)
                self._add("open", "", 1)
            for instance_id in {instance_id for _, instance_id, _ in undone if instance_id is not None}:
                connection.execute(
                    "DELETE FROM ledger_finished WHERE instance_id = ? AND closed_no > ?", (instance_id, row[0])
                )
            connection.execute("DELETE FROM ledger_checkpoints WHERE closed_no > ? OR step > ?", (*row, step))
            return [rollout_id for rollout_id, _, _ in undone]

    def resume(self, step: int, *, kept: Collection[str], reason: str = "restarted") -> int:
        """``rewind`` to the checkpoint of ``step`` in a new process, whose data source holds the rollouts ``kept``
        ready and knows of no others: what else was in flight or ready is cancelled for ``reason``. Returns how many
        were; their instances are to be run again."""
        with self.batch():
            self.rewind(step)
            with self._database.reading() as connection:
                unfinished = [
                    row[0] for row in connection.execute("SELECT rollout_id FROM ledger_rollouts WHERE state < 2")
                ]
            here = set(kept)
            self.ready_many([rollout_id for rollout_id in unfinished if rollout_id in here])
            return self.close_many(
                [rollout_id for rollout_id in unfinished if rollout_id not in here], Outcome.CANCELLED, reason
            )

    def shut(self) -> None:
        """Close the file, if it is this ledger's own."""
        if self._owns_database:
            self._database.close()

    # -- internals ----------------------------------------------------------------------------------------------------

    def _move_many(self, rollout_ids: Sequence[str], origin: int, target: int) -> int:
        moved = 0
        with self._database.transaction() as connection:
            for chunk in _chunks(rollout_ids):
                query = f"UPDATE ledger_rollouts SET state = ? WHERE state = ? AND rollout_id IN ({_marks(chunk)})"
                moved += connection.execute(query, (target, origin, *chunk)).rowcount
            self._add(_STATES[origin], "", -moved)
            self._add(_STATES[target], "", moved)
        return moved

    def _add(self, kind: str, reason: str, n: int) -> None:
        if n:
            query = (
                "INSERT INTO ledger_counts VALUES (?, ?, ?) ON CONFLICT (kind, reason) DO UPDATE SET n = n + excluded.n"
            )
            self._database.connection.execute(query, (kind, reason, n))

    def _forget(self) -> None:
        connection = self._database.connection
        (oldest,) = connection.execute("SELECT min(closed_no) FROM ledger_checkpoints").fetchone()
        limit = self._closed_no - self._remembered
        limit = limit if oldest is None else min(limit, oldest)
        connection.execute("DELETE FROM ledger_rollouts WHERE state = 2 AND closed_no <= ?", (limit,))


def _chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """A statement for many rows is one step for SQLite and one release of the interpreter lock; 100 rows stay below
    every limit on variables."""
    for start in range(0, len(values), 100):
        yield values[start : start + 100]


def _marks(values: Sequence[object]) -> str:
    return ", ".join("?" * len(values))
