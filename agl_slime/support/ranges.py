"""Ranges of settings: one sentence for a value out of range."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from numbers import Integral, Real
from typing import Any

from agl_slime.errors import SettingError

_KINDS: dict[str, tuple[Any, str]] = {"int": (Integral, "an integer"), "float": (Real, "a number")}
_KINDS |= {
    "bool": (bool, "True or False"),
    "Mapping": (Mapping, "a dict"),
    "Sequence": ((list, tuple), "a list or tuple"),
}


def check_ranges(
    settings: Any, *ranges: tuple[str, Callable[[Any], bool], str], named: Callable[[str], str] = str
) -> None:
    """Raise ``SettingError`` for the first field of ``settings`` out of its range.

    A range is (field names separated by spaces, predicate, the range in words). A predicate must be false for NaN.
    ``None``, "not set", is allowed where the field's annotation has it; an annotated type is checked first. ``named``
    turns a field's name into the user's name for it, such as a flag.
    """
    for names, is_valid, words in ranges:
        for name in names.split():
            value, annotation = getattr(settings, name), _annotation(type(settings), name)
            if value is None and ("None" in annotation or not annotation):
                continue
            kind, kind_words = _KINDS.get(annotation.partition(" ")[0].partition("[")[0], (object, ""))
            if not isinstance(value, kind) or (isinstance(value, bool) and kind in (Integral, Real)):
                raise SettingError(named(name), f"must be {kind_words}, got {value!r:.80}")
            if not is_valid(value):
                raise SettingError(named(name), f"must be {words}, got {value!r:.80}")


def takes(function: Any, count: int) -> bool:
    """Whether ``function``, or a class, can be called with ``count`` arguments; one without a signature is."""
    try:
        inspect.signature(function).bind(*range(count))
    except ValueError:  # a type of C
        return True
    except TypeError:
        return False
    return True


@cache
def _annotation(owner: type, name: str) -> str:
    """The annotation of a field as it is written in the first class that has one; empty without any."""
    annotations = (vars(base).get("__annotations__", {}) for base in reversed(owner.__mro__))
    return str(next((each[name] for each in annotations if name in each), ""))
