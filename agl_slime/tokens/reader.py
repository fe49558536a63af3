"""How the text of an answer becomes its parts, whole and while it is sampled: one reader for agents and the gateway."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from agl_slime.tokens.answer import AnswerParts
from agl_slime.tokens.formats import ToolParser

_THINK, _END_OF_THINKING = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class AnswerReader:
    """``parser`` is ``None`` where no tools are offered. ``opened``: the prompt ends within an open block of thinking;
    ``None`` where nobody knows the prompt's tokens. ``special`` are tokens that are no text, left out of answers in
    which no call may be written with them."""

    parser: ToolParser | None = None
    opened: bool | None = None
    special: re.Pattern[str] | None = None

    def read(self, text: str, ids: Sequence[int] = ()) -> AnswerParts:
        """The parts of a whole answer; ``ids`` are the sampled tokens, where they are known."""
        reasoning, content, closed = self._split(text)
        if self.parser is None:
            return AnswerParts(reasoning, closed, content)
        parsed = self.parser.parse(content)
        return replace(parsed, reasoning=reasoning, reasoning_closed=closed, content=parsed.content.strip())

    def visible(self, text: str, stops: tuple[str, ...] = ()) -> AnswerParts:
        """Of an answer that is still sampled, the reasoning and the content that stand whatever follows."""
        text = before_marks(text.rstrip("\ufffd"), stops)
        if not self.opened and _THINK.startswith(begun := text.lstrip()) and begun != _THINK:
            return AnswerParts()
        reasoning, content, closed = self._split(text)
        if reasoning is not None and not closed:
            return AnswerParts(before_marks(reasoning, (_END_OF_THINKING,)).rstrip(), False)
        if self.parser is not None:
            content = before_marks(content, self.parser.marks()).strip()
        return AnswerParts(reasoning, closed, content)

    def _split(self, text: str) -> tuple[str | None, str, bool]:
        """The reasoning, what follows it, and whether the reasoning is closed."""
        if self.special is not None and self.parser is None:
            text = self.special.sub("", text)
        begun = text.lstrip()
        if begun.startswith(_THINK):
            begun = begun[len(_THINK) :]
        elif not (self._seems_opened(text) if self.opened is None else self.opened):
            return None, text, True
        thought, mark, rest = begun.partition(_END_OF_THINKING)
        return thought.strip(), rest.lstrip("\n") if mark else "", bool(mark)

    @staticmethod
    def _seems_opened(text: str) -> bool:
        before, mark, _ = text.partition(_END_OF_THINKING)
        return bool(mark) and _THINK not in before


def before_marks(text: str, marks: tuple[str, ...]) -> str:
    """``text`` up to the first of ``marks``, or to where one may begin at its end."""
    text = text[: min((at for mark in marks if (at := text.find(mark)) >= 0), default=len(text))]
    begun = (n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n]))
    return text[: len(text) - max(begun, default=0)]
