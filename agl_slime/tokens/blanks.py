"""Comparison of texts up to white space and empty blocks, which templates trim, pad and leave out."""

from __future__ import annotations

import re

_BLANK = re.compile(r"\s+|<(\w+)>\s*</\1>")


def same_but_for_blanks(a: str, b: str) -> bool:
    """Whether two texts differ in white space and empty blocks at most."""
    return a == b or squash(a) == squash(b)


def squash(text: str) -> str:
    """``text`` without white space and empty blocks."""
    return _BLANK.sub("", text)


def match_end(written: str, text: str, done: int = 0) -> int | None:
    """The place in ``written`` up to which it says what ``text`` says; the first ``done`` characters of both are the
    same. ``None`` when it says something else."""
    if written.startswith(text):
        return len(text)
    wanted = squash(text[done:])
    at, shared = done, 0
    for blank in _BLANK.finditer(written, done):
        piece = written[at : blank.start()]
        if shared + len(piece) >= len(wanted):
            break
        if not wanted.startswith(piece, shared):
            return None
        at, shared = blank.end(), shared + len(piece)
    end = at + len(wanted) - shared
    return end if written[at:end] == wanted[shared:] else None
