"""Files of tasks: JSON lines or parquet, whole or a slice of their rows (``PATH@[0:3000]``, as slime writes it)."""

from __future__ import annotations

import datetime
import decimal
import hashlib
import io
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError, missing_as_error
from agl_slime.support.files import read_whole

_LINE_END = re.compile("\r\n?|\n")

_SLICED = re.compile(r"(.*)@\[(-?\d*):(-?\d*)\]", re.DOTALL)


def split_slice(path: str | Path) -> tuple[Path, slice]:
    """The file of ``PATH@[start:end]`` and the slice of its rows; either end may be absent or negative."""
    if (match := _SLICED.fullmatch(str(path))) is None:
        return Path(path), slice(None)
    start, end = (int(bound) if bound else None for bound in match.group(2, 3))
    return Path(match[1]), slice(start, end)


def digest(path: str | Path) -> str:
    """SHA-256 of the file, and of the slice if there is one."""
    file, part = split_slice(path)
    whole = hashlib.sha256(read_whole(file))
    if part != slice(None):
        whole.update(f"[{part.start}:{part.stop}]".encode())
    return whole.hexdigest()


def read_rows(path: str | Path, *, flag: str) -> Iterator[tuple[str, Any]]:
    """Rows of a file, each with its place for messages. Raises ``ConfigError``, which begins with ``flag``, and
    ``MissingDependencyError`` for a parquet file without pyarrow."""
    file, part = split_slice(path)
    rows = _parquet_rows(file, flag) if file.suffix == ".parquet" else _json_rows(file, flag)
    if (part.start or 0) < 0 or (part.stop or 0) < 0:
        return iter([*rows][part])
    return islice(rows, part.start, part.stop)


def _json_rows(file: Path, flag: str) -> Iterator[tuple[str, Any]]:
    try:
        # not splitlines(), which also splits at U+2028 and other characters inside of JSON strings
        lines = _LINE_END.split(read_whole(file).decode("utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(file, flag, error) from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{flag} {file}, line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{flag} {file}, line {number}: not JSON ({error})") from error


def _parquet_rows(file: Path, flag: str) -> Iterator[tuple[str, Any]]:
    with missing_as_error(f'{flag} {file}: pip install "agl-slime[parquet]" reads parquet files'):
        from pyarrow import ArrowException, parquet
    number = 0
    try:
        with parquet.ParquetFile(file if file.is_file() else io.BytesIO(read_whole(file))) as opened:
            for batch in opened.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{flag} {file}, row {number}", plain(row)
    except (ArrowException, OSError) as error:
        raise _unreadable(file, flag, error) from error


def plain(value: Any) -> Any:
    """A parquet value as JSON has it, but for bytes: times in ISO format, decimals as floats. Fields of a nested record
    that are null are left out: a column of records has in each row the fields of all."""
    if isinstance(value, dict):
        return {name: _without_nulls(plain(inner)) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_nulls(plain(inner)) for inner in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return float(value) if isinstance(value, decimal.Decimal) else value


def without_bytes(row: Any, place: str) -> Any:
    """``row``, if JSON can hold it. Raises ``ConfigError`` for bytes in a column."""
    for name, value in row.items() if isinstance(row, dict) else ():
        if _has_bytes(value):
            raise ConfigError(f"{place}: the column {name!r} has bytes, which a task cannot hold: leave it out")
    return row


def _has_bytes(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, bytes) or any(map(_has_bytes, inner))


def _without_nulls(value: Any) -> Any:
    return {name: inner for name, inner in value.items() if inner is not None} if isinstance(value, dict) else value


def _unreadable(file: Path, flag: str, error: Exception) -> ConfigError:
    return ConfigError(f"{flag} {file}: cannot be read ({getattr(error, 'strerror', None) or error})")
