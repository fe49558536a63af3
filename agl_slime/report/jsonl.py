"""JSON lines that survive a kill: valid JSON only, one flush per write, a torn last line is read over and cut before
more is appended."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from pathlib import Path
from typing import IO, Any

from agl_slime.errors import ConfigError


def jsonable(value: Any) -> Any:
    """``value`` as what JSON can hold.

    Dataclasses and mappings become objects, enums their value, NaN and infinity None, numpy and torch scalars numbers,
    anything unknown text.
    """
    if value is None or isinstance(value, bool | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, Enum):
        return jsonable(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted((jsonable(item) for item in value), key=str)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [jsonable(item) for item in value]
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        return jsonable(item())
    return str(value)


def dump_line(record: Mapping[str, Any]) -> bytes:
    """One line of UTF-8 JSON, newline included; a lone surrogate becomes its JSON escape."""
    return (json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False) + "\n").encode(
        "utf-8", "backslashreplace"
    )


def write_json(path: Path, value: Any) -> None:
    """Write one JSON document in place of the file, which is never seen half written."""
    part = path.with_name(path.name + ".part")
    text = json.dumps(jsonable(value), ensure_ascii=False, allow_nan=False, indent=2) + "\n"
    part.write_bytes(text.encode("utf-8", "backslashreplace"))
    os.replace(part, path)


def iter_jsonl(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of the file in order.

    A last line that is no JSON object was torn by a kill and is left out; any other such line is a ``ConfigError``.
    """
    bad: int | None = None
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if bad is not None:
                raise ConfigError(
                    f"line {bad} of {os.fspath(path)} is not a JSON object; remove that line or start with another output directory"
                )
            if not line.strip():
                continue
            record = _parse(line)
            if record is None:
                bad = number
            else:
                yield record


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # JSONDecodeError, or UTF-8 cut in the middle of a character
        return None
    return record if isinstance(record, dict) else None


class IterationFile:
    """Appends records that belong to an iteration. Writing an iteration again replaces it and every later one, so a
    resumed run leaves no duplicates.

    Nothing is touched before the first ``append``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: IO[bytes] | None = None
        self._last: float = -math.inf

    def append(self, iteration: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Write the records, each with ``iteration`` first, and hand them to the operating system before returning."""
        if self._file is None:
            self._open(iteration)
        elif iteration <= self._last:
            self._file.close()
            self._open(iteration)
        assert self._file is not None
        self._file.write(b"".join(dump_line({"iteration": iteration, **record}) for record in records))
        self._file.flush()
        self._last = iteration

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, iteration: int) -> None:
        """Keep the whole records of earlier iterations, then append."""
        self._file = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            part = self.path.with_name(self.path.name + ".part")
            with part.open("wb") as kept:
                for record in iter_jsonl(self.path):
                    if record.get("iteration", iteration) < iteration:
                        kept.write(dump_line(record))
            os.replace(part, self.path)
        self._file = self.path.open("ab")
