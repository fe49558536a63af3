"""Ranges of settings: one sentence for a value out of range."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from numbers import Integral, Real
from typing import Any

from agl_slime.errors import SettingError

# by annotation: exact types, whose test is fast; a type or types of which instances are accepted; the name in errors
_KINDS: dict[str, tuple[tuple[type, ...], Any, str]] = {
    "int": ((int,), Integral, "an integer"),
    "float": ((float, int), Real, "a number"),
    "bool": ((bool,), bool, "True or False"),
    "Mapping": ((dict,), Mapping, "a dict"),
    "Sequence": ((tuple,), (list, tuple), "a list or tuple"),
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
            value, (optional, exact, kind, kind_words) = getattr(settings, name), _kind_of(type(settings), name)
            if value is None and optional:
                continue
            number = kind in (Integral, Real)
            if type(value) not in exact and (not isinstance(value, kind) or (number and isinstance(value, bool))):
                raise SettingError(named(name), f"must be {kind_words}, got {value!r:.80}")
            if not is_valid(value):
                raise SettingError(named(name), f"must be {words}, got {value!r:.80}")


def makes_callables(kind: type) -> bool:
    """Whether the instances of a class can be called."""
    return any("__call__" in vars(base) for base in kind.__mro__)


def takes(function: Any, count: int, *names: str) -> bool:
    """Whether ``function``, or a class, can be called with ``count`` arguments, or beside others with these and
    ``names``; one without a signature is."""
    try:
        signature = inspect.signature(function)
        (signature.bind_partial if names else signature.bind)(*range(count), **dict.fromkeys(names))
    except ValueError:  # a type of C
        return True
    except TypeError:
        return False
    return True


@cache
def _kind_of(owner: type, name: str) -> tuple[bool, tuple[type, ...], Any, str]:
    """Whether a field may be ``None``, and its kind, by the annotation of the first class that has one."""
    annotations = (vars(base).get("__annotations__", {}) for base in reversed(owner.__mro__))
    annotation = str(next((each[name] for each in annotations if name in each), ""))
    kind = _KINDS.get(annotation.partition(" ")[0].partition("[")[0], ((), object, ""))
    return "None" in annotation or not annotation, *kind
