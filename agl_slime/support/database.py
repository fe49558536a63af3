"""SQLite as this package uses it: one connection, explicit transactions, safe against ``kill -9``."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agl_slime.errors import ConfigError


class Database:
    """A connection that threads share under one lock; ``transaction`` may be nested and commits when the outermost one
    ends.

    ``path=None`` keeps everything in memory. On disk the journal is a write-ahead log with ``synchronous=NORMAL``: what
    was committed survives the death of the process at any moment, and a power cut costs at most the last commits, never
    the file (sqlite.org/wal.html, "Performance Considerations"). ``exclusive`` holds the file's lock as long as the
    connection lives, so that two processes cannot serve one file.
    """

    def __init__(self, *, path: Path | str | None = None, exclusive: bool = False) -> None:
        self.path = Path(path) if path is not None else None
        self._lock = threading.RLock()
        self._depth = 0
        try:
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self.connection = sqlite3.connect(
                self.path or ":memory:",
                isolation_level=None,
                check_same_thread=False,
                timeout=0.0 if exclusive else 5.0,
            )
            if exclusive:
                self.connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            self.connection.execute("PRAGMA journal_mode=WAL")
            self.connection.execute("PRAGMA synchronous=NORMAL")
            self.connection.execute("PRAGMA cache_size=-65536")
            # 64 MB of log before it is copied into the file: what is written and soon deleted again is never copied
            self.connection.execute("PRAGMA wal_autocheckpoint=16384")
        except (sqlite3.Error, OSError) as error:
            hint = "; another process uses it" if "locked" in str(error) else ""
            raise ConfigError(f"the database {self.path} cannot be opened: {error}{hint}") from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All that happens inside is kept, or none of it when an exception leaves the outermost block."""
        with self._lock:
            if self._depth == 0:
                self.connection.execute("BEGIN IMMEDIATE")
            self._depth += 1
            try:
                yield self.connection
            except BaseException:
                self._depth -= 1
                if self._depth == 0 and self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")
                raise
            self._depth -= 1
            if self._depth == 0:
                self.connection.execute("COMMIT")

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The connection, for queries that no writer of this process may come between."""
        with self._lock:
            yield self.connection

    def close(self) -> None:
        with self._lock:
            self.connection.close()
