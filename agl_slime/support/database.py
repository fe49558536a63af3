"""An SQLite database with one connection and explicit transactions, safe against ``kill -9``."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agl_slime.errors import ConfigError, FileLockedError
from agl_slime.support.files import disk_full_as_error

logger = logging.getLogger(__name__)

_SOON_S = 5.0  # locks of programs that read or copy a database are mostly shorter
_PATIENCE_S = 300.0


class Database:
    """A connection that threads share under one lock; ``transaction`` may be nested and commits when the outermost one
    ends.

    ``path=None`` keeps everything in memory. On disk the journal is a write-ahead log with ``synchronous=NORMAL``:
    commits survive a kill of the process; a power failure loses at most the last commits, never the file
    (sqlite.org/wal.html, "Performance Considerations"). ``exclusive`` locks the file while the connection lives, so
    that two processes cannot serve one file, which has keys of generators' runs and which its user alone can read;
    without it, another program's lock is waited for, with a warning, and is a ``FileLockedError`` after five minutes.
    """

    def __init__(self, *, path: Path | str | None = None, exclusive: bool = False) -> None:
        self.path = Path(path) if path is not None else None
        self._lock = threading.RLock()
        try:
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                if exclusive:
                    self.path.touch(mode=0o600)
            self._patient = not exclusive
            self.connection = sqlite3.connect(self.path or ":memory:", isolation_level=None, check_same_thread=False)
            self._wait_for_locks(_SOON_S if self._patient else 0.0)
            # a checkpoint per 64 MB of log: rows that are soon deleted are never copied into the file
            pragmas = ["journal_mode=WAL", "synchronous=NORMAL", "cache_size=-65536", "wal_autocheckpoint=16384"]
            for pragma in ["locking_mode=EXCLUSIVE", *pragmas] if exclusive else pragmas:
                self._unlocked(f"PRAGMA {pragma}")
        except (sqlite3.Error, OSError) as error:
            hint = "; another process uses it" if "locked" in str(error) else ""
            raise ConfigError(f"the database {self.path} cannot be opened: {error}{hint}") from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit at the end of the outermost block; an exception that leaves it rolls back."""
        with self._lock, disk_full_as_error(self.path or Path()):
            outermost = not self.connection.in_transaction
            if outermost:
                self._unlocked("BEGIN IMMEDIATE")
            try:
                yield self.connection
            except BaseException:
                if outermost and self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise
            if outermost:
                self.connection.execute("COMMIT")

    def _unlocked(self, statement: str) -> None:
        """Execute a statement that needs the database's lock."""
        try:
            self.connection.execute(statement)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or not self._patient:  # without its extension
                raise
            which = f"{self.path} is locked by another program, such as a backup or a notebook"
            logger.warning("%s; the run waits for it, %g minutes at most.", which, _PATIENCE_S / 60)
            self._wait_for_locks(_PATIENCE_S)
            try:
                self.connection.execute(statement)
            except sqlite3.OperationalError:
                fix = "close it there, or copy the file and open the copy"
                raise FileLockedError(f"{which}, for {_PATIENCE_S / 60:g} minutes: {fix}, then resume") from error
            finally:
                self._wait_for_locks(_SOON_S)

    def _wait_for_locks(self, seconds: float) -> None:
        self.connection.execute(f"PRAGMA busy_timeout={seconds * 1000:.0f}")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, for queries between which no thread writes."""
        with self._lock:
            yield self.connection

    def close(self) -> None:
        with self._lock:
            self.connection.close()
