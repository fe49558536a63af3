"""A digest of a conversation's text, to be compared with a later rendering without keeping the text."""

from __future__ import annotations

import hashlib
import re

_EMPTY_BLOCK = re.compile(r"<(\w+)></\1>")
# at the end of a text without white space: the possible beginning of an empty block that the next piece ends
_PARTIAL_BLOCK = re.compile(r"<(?:\w*|\w+>(?:<(?:/\w*)?)?)$")


class TextDigest:
    """A digest of text in pieces, without white space and empty blocks (as ``blanks.squash``). The pieces of the
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
        other = TextDigest(*self._pieces)
        other._digest = self._digest.copy()
        return other

    def matches(self, text: str, *more: str) -> bool:
        """Whether the digested text, followed by ``more``, is ``text``."""
        mine, others = self.copy(), TextDigest()
        mine.add(*more)
        others.add(text)
        return mine._digest.digest() == others._digest.digest() and mine._pieces == others._pieces
