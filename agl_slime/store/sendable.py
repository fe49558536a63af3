"""``check_sendable``: whether a task reaches runners in other processes unchanged. JSON has no NaN, no lone
surrogates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pydantic_core import PydanticSerializationError, to_json

from agl_slime.errors import ConfigError


def check_sendable(task: Any) -> None:
    """Raise ``ConfigError`` with place and value for a task that JSON cannot hold."""
    try:
        written = to_json(task, inf_nan_mode="constants")
        if b"NaN" not in written and b"Infinity" not in written:
            return
    except (PydanticSerializationError, RecursionError):
        pass
    if (problem := _unsendable(task, "task")) is not None:
        raise ConfigError(f"{problem} for runners in other processes: change it, or run with --runners inproc")


def _unsendable(value: Any, place: str) -> str | None:
    if isinstance(value, Mapping):
        inside = [(each, f"{place}[{key!r:.80}]") for key, each in value.items()]
        inside += [(key, f"a key of {place}") for key in value]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = [(each, f"{place}[{number}]") for number, each in enumerate(value)]
    elif isinstance(value, float) and not math.isfinite(value):
        return f"{place} is {value!r}, which JSON cannot hold"
    else:
        try:
            to_json(value)
        except PydanticSerializationError:
            return f"{place} is {value!r:.80} ({type(value).__name__}), which JSON cannot hold"
        return None
    try:
        return next(filter(None, (_unsendable(each, at) for each, at in inside)), None)
    except RecursionError:
        return f"{place} is nested too deep, which JSON cannot hold"
