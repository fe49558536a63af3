"""What was written of a conversation, to be compared with another rendering of it later, without keeping the text."""

from __future__ import annotations

import hashlib
import re

_EMPTY_BLOCK = re.compile(r"<(\w+)></\1>")
# of a text without white space, what may be the beginning of an empty block that goes on in the next piece
_BEGUN = re.compile(r"<(?:\w*|\w+>(?:<(?:/\w*)?)?)$")


class TextDigest:
    """Text in pieces, of which white space and empty blocks do not count (``same_but_for_blanks``). What is there
    before the first ``add`` is taken as it is: of a conversation that is rendered whole each time nothing is hashed."""

    __slots__ = ("_digest", "_pieces")

    def __init__(self, *pieces: str) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self._pieces = pieces

    def add(self, *pieces: str) -> None:
        text = "".join("".join((*self._pieces, *pieces)).split())
        start = text.rfind("<", 0, max(0, text.rfind("<")))  # what is open has two "<" at most
        begun = _BEGUN.search(text, max(0, start))
        end = len(text) if begun is None else begun.start()
        said, self._pieces = text[:end], (text[end:],)
        if "></" in said:
            said = _EMPTY_BLOCK.sub("", said)
        self._digest.update(said.encode("utf-8", "surrogatepass"))

    def copy(self) -> TextDigest:
        other = TextDigest(*self._pieces)
        other._digest = self._digest.copy()
        return other

    def matches(self, text: str, *more: str) -> bool:
        """Whether what was written, and ``more``, is ``text``."""
        mine, others = self.copy(), TextDigest()
        mine.add(*more)
        others.add(text)
        return mine._digest.digest() == others._digest.digest() and mine._pieces == others._pieces
