"""Readers of damage and of the ledger, for an audit: lines and files that are not as they were written."""

from __future__ import annotations

import re
import shutil
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agl_slime.report.records import read_object, read_regular

CHECKSUMS = "agl_slime_checksums.json"
_CHECKED = re.compile(rb'(.*), "crc": (\d+)\}\n?', re.DOTALL)


def broken_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines whose ``crc`` is not the checksum of all bytes up to it. Each line is checked from the ``crc`` of the
    line before, so that one damaged line is one finding."""
    crc = 0
    for number, raw in enumerate(read_regular(path).splitlines(keepends=True), 1):
        if (match := _CHECKED.fullmatch(raw)) is None:
            if raw.endswith(b"\n"):
                yield number, "carries no checksum"
            continue
        if zlib.crc32(match[1], crc) != int(match[2]) or not raw.endswith(b"\n"):
            yield number, "is not as it was written, or a line before it is missing"
        crc = int(match[2])


def changed_files(directory: Path) -> Iterator[tuple[str, str]]:
    """The files of ``directory`` that differ from its checksums."""
    try:
        sums = read_object(directory / CHECKSUMS)
    except ValueError as error:
        yield CHECKSUMS, str(error)
        return
    here = {path.name for path in directory.iterdir() if not path.is_dir() and path.name != CHECKSUMS}
    for name in sorted(here - set(sums)):
        yield name, "is not among the files with checksums"
    yield from other_files(directory, sums, "is not as it was written")


def other_files(directory: Path, sums: Mapping[str, Any], text: str) -> Iterator[tuple[str, str]]:
    """The files whose size and CRC-32 are not as in ``sums``, each with ``text``, or why it cannot be read."""
    for name, checksum in sums.items():
        try:
            content = read_regular(directory / name)
        except ValueError as error:
            yield name, str(error)
            continue
        if checksum != [len(content), zlib.crc32(content)]:
            yield name, text


def read_database(path: Path, *queries: str) -> list[list[tuple]]:
    """The rows of each query on a database; nothing is written beside it, and it may be on a read-only disk."""
    read_regular(path)
    try:
        with _snapshot(path) as address, closing(sqlite3.connect(address, uri=True)) as connection:
            if connection.execute("PRAGMA integrity_check").fetchone() != ("ok",):
                raise ValueError("is damaged according to SQLite")
            return [connection.execute(query).fetchall() for query in queries]
    except sqlite3.Error as error:
        raise ValueError(f"cannot be read by SQLite: {error}") from None


@contextmanager
def _snapshot(path: Path) -> Iterator[str]:
    """The SQLite address of the database as it is now. SQLite reads a write-ahead log only with a ``-shm`` file, which
    it makes beside it: a database with such a log, of a run that was killed or is running, is copied with it."""
    address, log = f"{path.resolve().as_uri()}?immutable=1", path.with_name(f"{path.name}-wal")
    if not log.is_file():
        yield address
        return
    with TemporaryDirectory() as scratch:
        for name in "abcdefgh":
            copy = Path(scratch, name)
            try:
                state = _state_of(path, log)
                shutil.copyfile(path, copy)
                shutil.copyfile(log, f"{copy}-wal")
                if _state_of(path, log) == state:
                    address = copy.as_uri()
                    break
            except OSError as error:
                if log.is_file():  # else the run has just ended
                    raise ValueError(f"cannot be read: {error.strerror}") from None
                break
        else:
            raise ValueError("is being rewritten all the time: try it again")
        yield address


def _state_of(path: Path, log: Path) -> tuple[int, int, bytes]:
    """Changes when SQLite copies the log into the database and starts a new log."""
    with log.open("rb") as file:
        return path.stat().st_mtime_ns, path.stat().st_size, file.read(32)
