"""Comparison of texts without white space and empty blocks, which templates trim, pad and omit."""

from __future__ import annotations

import re

_BLANK = re.compile(r"\s+|<(\w+)>\s*</\1>")


def squash(text: str) -> str:
    """``text`` without white space and empty blocks."""
    return _BLANK.sub("", text)


def match_end(written: str, text: str, done: int = 0) -> int | None:
    """The end of the prefix of ``written`` that equals ``text`` without blanks; the first ``done`` characters of both
    are the same. ``None`` if ``written`` does not begin with ``text``."""
    if written.startswith(text):
        return len(text)
    squashed = squash(text[done:])
    position, shared = done, 0
    for blank in _BLANK.finditer(written, done):
        piece = written[position : blank.start()]
        if shared + len(piece) >= len(squashed):
            break
        if not squashed.startswith(piece, shared):
            return None
        position, shared = blank.end(), shared + len(piece)
    end = position + len(squashed) - shared
    return end if written[position:end] == squashed[shared:] else None
