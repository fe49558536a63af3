"""Base classes of tool call formats, and the registry of their parsers.

A parser never raises and never repairs: text that looks like a call but cannot be parsed is ``malformed``, stays in the
content, and is counted. A mark that is only mentioned is text; in an answer without any call the reader counts it, too.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agl_slime.support.registry import Registry
from agl_slime.tokens.answer import AnswerParts, ToolCall

MAX_ENDS = 16  # end marks that are tried for one call
_MAX_UNREAD = 256  # marks without a call, as in an answer that repeats itself; the rest is text


class ToolParser(ABC):
    """A parser of the calls in the content of an answer, which begins after its reasoning."""

    template_marks: tuple[str, ...] = ()
    """Texts in the source of chat templates with this format; one of them is enough."""
    tokens: tuple[str, ...] = ()
    """Marks that are special tokens in models with this format: the same text sampled as other tokens is a mention."""
    call_grammar: tuple[str, str, str] | None = None
    """The texts before and after a call's arguments, with ``NAME`` for the function, and xgrammar's style of the
    arguments; ``None`` for a format that no grammar describes."""
    between = "\n"  # separates two calls
    section = ("", "")  # surrounds all calls
    ends_thinking = False
    """Whether a complete call ends the thinking before it, as for this format's models in SGLang."""

    @abstractmethod
    def parse(self, text: str) -> AnswerParts: ...

    def marks(self) -> tuple[str, ...]:
        """The possible beginnings of calls: in a partial answer, text from one on may become a call."""
        return "{", "<|"

    def signs(self) -> tuple[str, ...]:
        """The texts of which one is in an answer that tries to call; an answer that has one and no call is counted."""
        return tuple(filter(None, (*self.tokens, *self.template_marks)))

    def first_call(self, text: str) -> int | None:
        """The beginning of the first complete call, with the marks that open it; for formats with ``ends_thinking``."""
        return None

    def forced_grammar(self, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The grammar of one or several calls of ``functions`` and nothing else, as an xgrammar structural tag, which
        SGLang accepts. ``None`` if this format has none."""
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
        """The grammar of a call's arguments and of the text between them and the name."""
        return {"type": "json_schema", "json_schema": schema} | ({} if style == "json" else {"style": style})

    def convert_types(self, call: ToolCall, parameters: Mapping[str, Any] | None) -> ToolCall:
        """``call`` with its arguments in the types of the JSON schema ``parameters``, for formats that write text."""
        return call


class BlockParser(ToolParser):
    """A format whose calls begin with the mark ``begin`` and end with ``end`` if that is not empty; ``inner`` are marks
    within a call. ``opening`` and ``closing`` surround several calls; with ``sectioned`` no call is outside of them."""

    begin: str
    end: str = ""
    opening: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    sectioned = False
    head = re.compile(r"\s*[\[{]")
    """The beginning of a call after ``begin``."""
    starts: re.Pattern[str] | None = None
    """The same of a call that is not closed, where that is another one."""

    @property
    def tokens(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.begin, self.end, *self.opening, *self.closing, *self.inner

    @abstractmethod
    def read(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        """The calls after the mark that ends at ``start``, and their end; ``ValueError`` without any."""

    def marks(self) -> tuple[str, ...]:
        return *self.opening, self.begin

    def parse(self, text: str) -> AnswerParts:
        content, done = "", 0
        calls: list[ToolCall] = []
        malformed: list[str] = []
        for start, end, read in self._blocks(text):
            if not read:
                malformed.append(text[start:end])
                continue
            calls += read
            content += text[done:start]
            done = end
        return AnswerParts(content=content + text[done:], calls=number_calls(calls), malformed=tuple(malformed))

    def first_call(self, text: str) -> int | None:
        return next((start for start, _, calls in self._blocks(text) if calls), None)

    def _blocks(self, text: str) -> Iterator[tuple[int, int, list[ToolCall]]]:
        """Begin and end of all calls, with the marks around them, and of text that looks like a call and is none."""
        done = position = unread = 0
        while unread < _MAX_UNREAD and (mark := text.find(self.begin, position)) >= 0:
            position = mark + len(self.begin)
            unread += 1
            if self.sectioned and not self._in_section(text, mark):
                continue
            start = mark - _opening(text[done:mark], self.opening)
            try:
                calls, end = self.read(text, position)
            except (ValueError, RecursionError):
                if (end := self._unread(text, position)) is not None:
                    yield start, end, []
                continue
            unread -= 1
            done = position = _after(text, end, self.closing)
            yield start, done, calls

    def _in_section(self, text: str, position: int) -> bool:
        return _last(text, self.opening, position) > _last(text, self.closing, position)

    def _unread(self, text: str, start: int) -> int | None:
        """The end of a seeming call after the mark that ends at ``start``; ``None`` if the mark is only mentioned."""
        following = text.find(self.begin, start)
        end = text.find(self.end, start) if self.end else -1
        if end >= 0 and not 0 <= following < end:
            return _after(text, end + len(self.end), self.closing)
        begun = (self.starts or self.head).match(text, start)
        return (following if following >= 0 else len(text)) if begun else None


def _last(text: str, marks: tuple[str, ...], end: int) -> int:
    return max((text.rfind(mark, 0, end) for mark in marks), default=-1)


def _opening(text: str, opening: tuple[str, ...]) -> int:
    """The length of the mark at the end of ``text``, with the blanks after it."""
    bare = text.rstrip()
    mark = next((mark for mark in opening if bare.endswith(mark)), None)
    return 0 if mark is None else len(text) - len(bare) + len(mark)


def _after(text: str, end: int, closing: tuple[str, ...]) -> int:
    start = skip_blanks(text, end)
    return next((start + len(mark) for mark in closing if text.startswith(mark, start)), end)


def cut_at_marks(text: str, marks: Sequence[str]) -> str:
    """``text`` up to the first of ``marks``, or up to a possible beginning of one at its end."""
    first = min((index for mark in marks if (index := text.find(mark)) >= 0), default=None)
    if first is not None:
        return text[:first]
    partial = (n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n]))
    return text[: len(text) - max(partial, default=0)]


def number_calls(calls: list[ToolCall]) -> tuple[ToolCall, ...]:
    return tuple(call if call.id else replace(call, id=f"call_{number}") for number, call in enumerate(calls))


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


_BLANKS = re.compile(r"\s*")


def skip_blanks(text: str, start: int) -> int:
    return _BLANKS.match(text, start).end()  # type: ignore[union-attr]


_DECODER = json.JSONDecoder()


def json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value at ``start``, and its end."""
    return _DECODER.raw_decode(text, skip_blanks(text, start))


def read_object(written: Any) -> dict[str, Any]:
    """An object, or the object that a string has as JSON. ``ValueError`` for anything else."""
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
    """The parser registered as ``name``; a parser is returned unchanged."""
    return name if isinstance(name, ToolParser) else _parsers[name]()
