"""What a format of tool calls is, and the formats whose calls begin with a mark.

A parser never raises and never mends: what looks like a call and cannot be read is ``malformed``, stays in the text as
the model wrote it, and is counted. A mark that is only mentioned is text.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agl_slime.support.registry import Registry
from agl_slime.tokens.answer import AnswerParts, ToolCall

_MOST_UNREAD = 256  # marks without a call behind them, as an answer that repeats itself has; what follows is text


class ToolParser(ABC):
    """Finds the calls in the content of an answer, which begins after its reasoning."""

    template_marks: tuple[str, ...] = ()
    """Texts in a chat template that ask for this format; one of them is enough."""
    tokens: tuple[str, ...] = ()
    """Marks that are tokens of their own in the vocabularies of models with this format: what has their text and is
    sampled as other tokens is a mention."""
    call_grammar: tuple[str, str, str] | None = None
    """The texts before and after a call's arguments, with ``NAME`` for the function's, and xgrammar's word for how
    those are written; ``None`` where a grammar cannot say it."""
    between = "\n"  # two calls
    section = ("", "")  # around all calls

    @abstractmethod
    def parse(self, text: str) -> AnswerParts: ...

    def marks(self) -> tuple[str, ...]:
        """What calls may begin with: of an answer that is still sampled, what follows one is not known to be text."""
        return "{", "<|"

    def forced_grammar(self, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The grammar of an answer that is one or several calls of ``functions`` and nothing else, as a format of
        xgrammar's structural tags, which SGLang takes. ``None`` where there is none for this format."""
        if self.call_grammar is None:
            return None
        begin, end, style = self.call_grammar
        tags = [
            {"type": "tag", "begin": begin.replace("NAME", function["name"]), "end": end}
            | {"content": self.arguments(function["parameters"], style)}
            for function in functions
        ]
        calls = {"type": "tags_with_separator", "tags": tags, "separator": self.between, "at_least_one": True}
        if self.section == ("", ""):
            return calls
        opening, closing = map(const, self.section)
        return {"type": "sequence", "elements": [opening, calls, closing]}

    def arguments(self, schema: Any, style: str) -> dict[str, Any]:
        """The grammar of a call's arguments, and of what stands between the name and them."""
        return {"type": "json_schema", "json_schema": schema} | ({} if style == "json" else {"style": style})

    def convert_types(self, call: ToolCall, parameters: Mapping[str, Any] | None) -> ToolCall:
        """``call`` with arguments of the types that the JSON schema ``parameters`` names, where the format writes
        everything as text."""
        return call


class BlockParser(ToolParser):
    """A format whose calls begin with the mark ``begin``. ``end`` closes a call, where there is such a mark; ``inner``
    are marks within one. ``opening`` and ``closing`` stand around several calls, and with ``sectioned`` there is no
    call outside of them."""

    begin: str
    end: str = ""
    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    sectioned = False
    starts = re.compile(r"\s*[\[{]")
    """What a call goes on with after ``begin``, where it is not closed."""

    @property
    def tokens(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.begin, self.end, *self.opening, *self.closing, *self.inner

    @abstractmethod
    def read(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        """The calls behind the mark that ends at ``at``, and where they end; ``ValueError`` when there are none."""

    def marks(self) -> tuple[str, ...]:
        return *self.opening, self.begin

    def parse(self, text: str) -> AnswerParts:
        content, done, at = "", 0, 0
        calls: list[ToolCall] = []
        malformed: list[str] = []
        unread = 0
        while unread < _MOST_UNREAD and (start := text.find(self.begin, at)) >= 0:
            at = start + len(self.begin)
            unread += 1
            if self.sectioned and _last(text, self.opening, start) <= _last(text, self.closing, start):
                continue
            try:
                read, end = self.read(text, at)
            except (ValueError, RecursionError):
                if looks := self._unread(text, start, at):
                    malformed.append(looks)
                continue
            unread -= 1
            calls += read
            content += _without(text[done:start], self.opening)
            done = at = _after(text, end, self.closing)
        return AnswerParts(content=content + text[done:], calls=number_calls(calls), malformed=tuple(malformed))

    def _unread(self, text: str, start: int, at: int) -> str:
        """What looks like a call at ``start``; empty where the mark is only mentioned."""
        following = text.find(self.begin, at)
        end = text.find(self.end, at) if self.end else -1
        if end >= 0 and not 0 <= following < end:
            return text[start : end + len(self.end)]
        return text[start : following if following >= 0 else None] if self.starts.match(text, at) else ""


def _last(text: str, marks: tuple[str, ...], before: int) -> int:
    return max((text.rfind(mark, 0, before) for mark in marks), default=-1)


def _without(text: str, opening: tuple[str, ...]) -> str:
    found = next((mark for mark in opening if text.rstrip().endswith(mark)), None)
    return text if found is None else text.rstrip().removesuffix(found)


def _after(text: str, end: int, closing: tuple[str, ...]) -> int:
    at = skip_blanks(text, end)
    return next((at + len(mark) for mark in closing if text.startswith(mark, at)), end)


def cut_at_marks(text: str, marks: Sequence[str]) -> str:
    """``text`` up to the first of ``marks``, or to where one may begin at its end."""
    first = min((at for mark in marks if (at := text.find(mark)) >= 0), default=None)
    if first is not None:
        return text[:first]
    begun = (n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n]))
    return text[: len(text) - max(begun, default=0)]


def number_calls(calls: list[ToolCall]) -> tuple[ToolCall, ...]:
    return tuple(call if call.id else replace(call, id=f"call_{number}") for number, call in enumerate(calls))


def const(value: str) -> dict[str, Any]:
    """The grammar of a fixed text."""
    return {"type": "const_string", "value": value}


_BLANKS = re.compile(r"\s*")


def skip_blanks(text: str, at: int) -> int:
    return _BLANKS.match(text, at).end()  # type: ignore[union-attr]


_DECODER = json.JSONDecoder()


def json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a place, and where it ends."""
    return _DECODER.raw_decode(text, skip_blanks(text, at))


def read_object(written: Any) -> dict[str, Any]:
    """An object, or JSON in a string that is one. ``ValueError`` when it is neither."""
    try:
        value = _DECODER.decode(written) if isinstance(written, str) else written
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


_parsers: Registry[ToolParser] = Registry("tool parser")
register_tool_parser = _parsers.register


def get_tool_parser(name: str | ToolParser) -> ToolParser:
    """The parser of that name; a parser is given back as it is."""
    return name if isinstance(name, ToolParser) else _parsers[name]()
