"""Strict readers of a run's files. Anything but a regular file with JSON objects of the expected shape is a
``ValueError`` with one sentence, never another exception and never a wait."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType
from typing import Any, NoReturn

import orjson

_MAX_DEPTH = 64
_CHECKED = re.compile(rb'(.*), "crc": (\d+)\}\n?', re.DOTALL)
CHECKSUMS = "agl_slime_checksums.json"
_NUMBER, _TEXT = (int, float), (str, NoneType)
_SAMPLE = {"segment": int, "prompt_length": int, "tokens": str, "pieces": [str], "left_out": int}
_SAMPLE |= {"engine_log_probs": str, "trainer_log_probs": str, "advantages": str, "weight_versions": [[str, int, int]]}
_SAMPLE |= {"turn_spans": [[int, int]], "trained": [[int, int]]}
_TURN = {"prompt_tokens": int, "tokens": int, "seconds": _NUMBER, "untrained": str, "kept_tokens": int}
_TOOLS = {"offered": {str: int}, "calls": {str: int}, "malformed": int, "failed": {str: int}, "failures": {str: str}}
_TOOLS["example"] = str  # of a malformed call
_OPTIONAL = {"failed", "failures", "example"}
_GROUP = {"collected": int, "group_id": str, "instance_id": _TEXT, "ready": bool, "code": str, "reason": str}
_GROUP |= {"rollouts": [str], "rewards": [(*_NUMBER, NoneType)], "outcomes": [str], "reasons": [str], "tokens": [int]}
_GROUP |= {"turns": [int], "samples": [int], "sealed": [[[str, int, {str: int}]]], "kept": [str], "tools": _TOOLS}
_GROUP |= {"truncated": int, "source": _TEXT, "weight_versions": [str], "alike": bool}
_KEPT = {"collected": int, "rollout_id": str, "group_id": str, "instance_id": _TEXT, "outcome": str}
_KEPT |= {
    "reward": (*_NUMBER, NoneType),
    "rewards": {str: _NUMBER},
    "tokens": int,
    "messages": [dict],
    "turns": [_TURN],
}
_KEPT |= {"reason": str, "message": str, "label": str, "samples": [_SAMPLE], "stop_reason": str}
_KEPT |= {"source": _TEXT, "left_out": {"samples": int}}
_TRAINED = {"instance_id": _TEXT, "rollouts": {str: (*_NUMBER, NoneType)}, "samples": [[str, str, int, {str: int}]]}
SHAPES: dict[str, dict[str, Any]] = {
    "metrics.jsonl": {"weights/version": (*_TEXT, *_NUMBER)},
    "trained.jsonl": _TRAINED,
    "groups.jsonl": _GROUP,
    "rollouts.jsonl": _KEPT,
}
"""The fields of each file's lines, besides ``iteration``. A list of several shapes has exactly one entry of each."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of ``size`` bytes at ``offset``: its record and its checksum ``crc``, or an ``error`` text."""

    number: int
    offset: int
    size: int
    record: dict[str, Any]
    crc: int = 0
    error: str = ""


def parse(text: bytes) -> Any:
    """The JSON value; ``ValueError`` for anything else, and for too deep nesting."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:  # Python's parser accepts lone surrogates
        try:
            value = json.loads(text, parse_constant=_refuse, parse_int=_parse_int)
        except RecursionError:
            raise ValueError("is nested too deep") from None
        except ValueError:
            raise ValueError("is not JSON") from None
    if text.count(b"[") + text.count(b"{") > _MAX_DEPTH:
        level = [value]
        for _ in range(_MAX_DEPTH):
            level = [inner for each in level for inner in _parts(each)]
        if level:
            raise ValueError("is nested too deep")
    return value


def read_regular(path: Path) -> bytes:
    """The content of a regular file (reading a FIFO would hang)."""
    try:
        if not path.is_file():
            raise ValueError("is not a regular file" if path.exists() or path.is_symlink() else "is missing")
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None


def read_object(path: Path) -> dict[str, Any]:
    value = parse(read_regular(path))
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


def read_lines(path: Path, *, offset: int = 0, number: int = 0, strict: bool = False) -> Iterator[Line]:
    """The lines from byte ``offset`` on, which follow line ``number``; ``strict`` refuses missing fields. A last line
    without an end is left out: it is being written, or a kill cut it short."""
    shape = {"iteration": int, **SHAPES.get(path.name, {})}
    if not strict:
        shape.pop("sealed", None)  # only for audits
    if not path.is_file():
        read_regular(path)
    with path.open("rb") as file:
        file.seek(offset)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            number += 1
            try:
                record = parse(raw)
                if error := misfit(record, shape, strict=strict):
                    raise ValueError(error)
                crc = record.pop("crc", 0)
                yield Line(number, offset, len(raw), record, crc if isinstance(crc, int) else 0)
            except ValueError as error:
                yield Line(number, offset, len(raw), {}, error=str(error))
            offset += len(raw)


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
    for name, checksum in sums.items():
        try:
            content = read_regular(directory / name)
        except ValueError as error:
            yield name, str(error)
            continue
        if checksum != [len(content), zlib.crc32(content)]:
            yield name, "is not as it was written"


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


def misfit(value: Any, shape: Any, name: str = "", *, strict: bool = False) -> str:
    """The first difference of ``value`` from ``shape`` as text, empty without one. Fields of simple types, nearly all,
    take no recursive call."""
    if isinstance(shape, type | tuple):
        return "" if type(value) in _kinds(shape) else f"has a wrong type in {name}"
    if shape is _TOOLS and value is None:
        return ""
    if type(value) is not type(shape):
        return f"has a wrong type in {name}" if name else "is not a JSON object"
    pairs: Iterable[tuple[Any, Any, str]]
    if isinstance(shape, dict):
        fields = dict.fromkeys(value, shape[str]) if str in shape else shape
        if strict and (missing := [key for key in fields if key not in value and key not in _OPTIONAL]):
            return f"lacks {', '.join(missing)}"
        pairs = ((value[key], inner, key) for key, inner in fields.items() if key in value)
    elif len(shape) > 1:
        if len(value) != len(shape):
            return f"has {len(value)} entries in {name}"
        pairs = ((item, inner, name) for item, inner in zip(value, shape, strict=True))
    elif isinstance(shape[0], type | tuple):  # long lists: all types at once
        return "" if {*map(type, value)} <= {*_kinds(shape[0])} else f"has a wrong type in {name}"
    else:
        pairs = ((item, shape[0], name) for item in value)
    for item, inner, key in pairs:
        if type(item) is not inner and (error := misfit(item, inner, key, strict=strict)):
            return error
    return ""


def _kinds(shape: Any) -> tuple[Any, ...]:
    return shape if isinstance(shape, tuple) else (shape,)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _parts(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _parse_int(text: str) -> int:
    if len(text) > 20:
        raise ValueError("has a number of too many digits")
    return int(text)
