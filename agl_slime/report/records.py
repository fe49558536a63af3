"""Strict readers of a run's files. Anything but a regular file with JSON objects of the expected shape is a
``ValueError`` with one sentence, never another exception and never a wait."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

import orjson

_MAX_DEPTH = 64
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
_KEPT |= {"reward": (*_NUMBER, NoneType), "rewards": {str: _NUMBER}, "tokens": int, "messages": [dict]}
_KEPT |= {"turns": [_TURN], "reason": str, "message": str, "label": str, "samples": [_SAMPLE], "stop_reason": str}
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
