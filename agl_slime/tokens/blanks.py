"""Comparison of texts without white space and empty blocks, which templates trim, pad and omit."""

from __future__ import annotations

import hashlib
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


_EMPTY_BLOCK = re.compile(r"<(\w+)></\1>")
# at the end of a text without white space: the possible beginning of an empty block that the next piece ends
_PARTIAL_BLOCK = re.compile(r"<(?:\w*|\w+>(?:<(?:/\w*)?)?)$")


class TextDigest:
    """A digest of text in pieces, without white space and empty blocks (as ``squash``). The pieces of the
    constructor are hashed at the first ``add``: a conversation that is rendered whole each time hashes nothing."""

    __slots__ = ("_digest", "_pieces")

    def __init__(self, *pieces: str) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self._pieces = pieces

    def add(self, *pieces: str) -> None:
        text = "".join("".join((*self._pieces, *pieces)).split())
        start = text.rfind("<", 0, max(0, text.rfind("<")))  # a partial block has two "<" at most
        partial = _PARTIAL_BLOCK.search(text, max(0, start))
        end = len(text) if partial is None else partial.start()
        complete, self._pieces = text[:end], (text[end:],)
        if "></" in complete:
            complete = _EMPTY_BLOCK.sub("", complete)
        self._digest.update(complete.encode("utf-8", "surrogatepass"))

    def copy(self) -> TextDigest:
        duplicate = TextDigest(*self._pieces)
        duplicate._digest = self._digest.copy()
        return duplicate

    def matches(self, text: str, *following: str) -> bool:
        """Whether the digested text, with ``following``, is ``text``."""
        digested, expected = self.copy(), TextDigest()
        digested.add(*following)
        expected.add(text)
        for digest in (digested, expected):  # with the text that the next piece could make an empty block of
            digest._digest.update(digest._pieces[0].encode("utf-8", "surrogatepass"))
        return digested._digest.digest() == expected._digest.digest()
