"""The text of single tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "�"
_MAX_CACHED = 300_000
_MAX_TOKENS_PER_CHARACTER = 8


class Pieces:
    """Texts of single tokens, which join to the decoded whole. A character of several tokens belongs to the last."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = tokenizer.decode
        self._texts: dict[int, str] = {}

    def __call__(self, ids: Sequence[int]) -> list[str]:
        """One text per id."""
        ids = list(ids)
        if len(self._texts) > _MAX_CACHED:
            self._texts.clear()
        for one in set(ids).difference(self._texts):
            self._texts[one] = self._decode([one])
        alone = [self._texts[one] for one in ids]
        whole = self._decode(ids)
        return alone if "".join(alone) == whole else self._in_context(ids)

    def _in_context(self, ids: list[int]) -> list[str]:
        """One text per id, from what it adds to the text of the tokens just before it."""
        pieces, start, read = [], 0, 0
        for end in range(1, len(ids) + 1):
            text = self._decode(ids[start:end])
            if text.endswith(_INCOMPLETE) and end < len(ids) and end - read < _MAX_TOKENS_PER_CHARACTER:
                pieces.append("")
                continue
            pieces.append(text[len(self._decode(ids[start:read])) :])
            start, read = read, end
        return pieces
