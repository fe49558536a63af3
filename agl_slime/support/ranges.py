"""Ranges of settings: one sentence for a value out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agl_slime.errors import SettingError


def check_ranges(
    settings: Any, *ranges: tuple[str, Callable[[Any], bool], str], named: Callable[[str], str] = str
) -> None:
    """Raise ``SettingError`` for the first field of ``settings`` out of its range.

    A range is (field names separated by spaces, predicate, the range in words). A predicate must be false for NaN.
    ``None``, "not set", is always allowed. ``named`` turns a field's name into the user's name for it, such as a flag.
    """
    for names, is_valid, words in ranges:
        for name in names.split():
            if (value := getattr(settings, name)) is not None and not is_valid(value):
                raise SettingError(named(name), f"must be {words}, got {value!r}")
