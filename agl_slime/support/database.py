"""An SQLite database with one connection and explicit transactions, safe against ``kill -9``."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agl_slime.errors import ConfigError
from agl_slime.support.files import disk_full_as_error


class Database:
    """A connection that threads share under one lock; ``transaction`` may be nested and commits when the outermost one
    ends.

    ``path=None`` keeps everything in memory. On disk the journal is a write-ahead log with ``synchronous=NORMAL``:
    commits survive a kill of the process; a power failure loses at most the last commits, never the file
    (sqlite.org/wal.html, "Performance Considerations"). ``exclusive`` locks the file while the connection lives, so
    that two processes cannot serve one file.
    """

    def __init__(self, *, path: Path | str | None = None, exclusive: bool = False) -> None:
        self.path = Path(path) if path is not None else None
        self._lock = threading.RLock()
        try:
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            timeout_s = 0.0 if exclusive else 5.0
            self.connection = sqlite3.connect(
                self.path or ":memory:", isolation_level=None, check_same_thread=False, timeout=timeout_s
            )
            # a checkpoint per 64 MB of log: rows that are soon deleted are never copied into the file
            pragmas = ["journal_mode=WAL", "synchronous=NORMAL", "cache_size=-65536", "wal_autocheckpoint=16384"]
            for pragma in ["locking_mode=EXCLUSIVE", *pragmas] if exclusive else pragmas:
                self.connection.execute(f"PRAGMA {pragma}")
        except (sqlite3.Error, OSError) as error:
            hint = "; another process uses it" if "locked" in str(error) else ""
            raise ConfigError(f"the database {self.path} cannot be opened: {error}{hint}") from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit at the end of the outermost block; an exception that leaves it rolls back."""
        with self._lock, disk_full_as_error(self.path or Path()):
            outermost = not self.connection.in_transaction
            if outermost:
                self.connection.execute("BEGIN IMMEDIATE")
            try:
                yield self.connection
            except BaseException:
                if outermost and self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise
            if outermost:
                self.connection.execute("COMMIT")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, for queries between which no thread writes."""
        with self._lock:
            yield self.connection

    def close(self) -> None:
        with self._lock:
            self.connection.close()
