"""Ranges of settings: one sentence for a value that lies outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agl_slime.errors import ConfigError


def check_ranges(
    settings: Any, *ranges: tuple[str, Callable[[Any], bool], str], named: Callable[[str], str] = str
) -> None:
    """Raise ``ConfigError`` for the first field of ``settings`` that does not fit.

    Of each range: its fields (with spaces between), what fits, and that in words. Write what fits so that NaN does not.
    ``None`` is "not set" and fits everywhere. ``named`` makes a field's name what a user knows it by, such as a flag.
    """
    for names, fits, words in ranges:
        for name in names.split():
            if (value := getattr(settings, name)) is not None and not fits(value):
                raise ConfigError(f"{named(name)} must be {words}, got {value!r}")
