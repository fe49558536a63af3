"""The text of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BROKEN = "�"
_MOST_KNOWN = 300_000
_LONGEST = 8  # tokens of one character


class Pieces:
    """Tokens to texts that join to what ``tokenizer.decode`` makes of them all. A character that several tokens make
    stands with the last of them; bytes that make none stand as they are decoded."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.decode
        self._known: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """One text per id."""
        ids = list(ids)
        if len(self._known) > _MOST_KNOWN:
            self._known.clear()
        for one in set(ids).difference(self._known):
            self._known[one] = self._decode([one])
        alone = [self._known[one] for one in ids]
        whole = self._decode(ids)
        return alone if "".join(alone) == whole else self._in_context(ids)

    def _in_context(self, ids: list[int]) -> list[str]:
        """By what each token adds to the text of those shortly before it."""
        pieces, start, read = [], 0, 0
        for end in range(1, len(ids) + 1):
            now = self._decode(ids[start:end])
            if now.endswith(_BROKEN) and end < len(ids) and end - read < _LONGEST:  # in the middle of a character
                pieces.append("")
                continue
            pieces.append(now[len(self._decode(ids[start:read])) :])
            start, read = read, end
        return pieces
