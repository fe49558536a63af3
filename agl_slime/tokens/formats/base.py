"""What a format of tool calls is, and the formats whose calls stand in blocks between two marks.

A parser never raises and never mends: what looks like a call and cannot be read is ``malformed``, stays in the text as
the model wrote it, and is counted.
"""

from __future__ import annotations

import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agl_slime.support.registry import Registry
from agl_slime.tokens.answer import AnswerParts, ToolCall

_THINK, _END_OF_THINKING = "<think>", "</think>"
_MOST_MARKS = 16  # ends that are tried for one call


class ToolParser(ABC):
    """Finds the calls in an answer. Calls inside of thinking are thoughts, and not made."""

    written: tuple[str, str, str] | None = None
    """What stands before and after a call's arguments, with ``NAME`` for the function's, and xgrammar's word for how
    those are written; ``None`` where a grammar cannot say it."""
    between = "\n"  # two calls

    @abstractmethod
    def parse(self, text: str) -> AnswerParts: ...

    def marks(self) -> tuple[str, ...]:
        """What calls may begin with: of an answer that is still sampled, what follows one is not known to be text."""
        return "{", "<|"

    def forced(self, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The grammar of an answer that is one or several calls of ``functions`` and nothing else, as a format of
        xgrammar's structural tags, which SGLang takes. ``None`` where there is none for this format."""
        if self.written is None:
            return None
        begin, end, style = self.written
        tags = [
            {
                "type": "tag",
                "begin": begin.replace("NAME", function["name"]),
                "content": {"type": "json_schema", "json_schema": function["parameters"]}
                | ({} if style == "json" else {"style": style}),
                "end": end,
            }
            for function in functions
        ]
        return {"type": "tags_with_separator", "tags": tags, "separator": self.between, "at_least_one": True}

    def typed(self, call: ToolCall, parameters: Mapping[str, Any] | None) -> ToolCall:
        """``call`` with arguments of the types that the JSON schema ``parameters`` names, where the format writes
        everything as text."""
        return call


class BlockParser(ToolParser):
    """A format whose calls stand in blocks between the marks ``begin`` and ``end``. Marks in the arguments of a
    well-formed call are arguments; a ``begin`` after an ``end`` only where arguments are ``quoted``, for else it may be
    the next call's."""

    begin: str
    end: str
    quoted = False

    @abstractmethod
    def read(self, block: str) -> ToolCall:
        """The call that a block holds; ``ValueError`` when it holds none."""

    def marks(self) -> tuple[str, ...]:
        return (self.begin,)

    def parse(self, text: str) -> AnswerParts:
        marks = re.compile("|".join(map(re.escape, (self.begin, _THINK, _END_OF_THINKING))))
        found: list[tuple[int, int, ToolCall | str]] = []  # with the places where they begin and end
        before_thinking: int | None = None  # how many were found before a <think> that is open
        at = 0
        while mark := marks.search(text, at):
            at = mark.end()
            if mark[0] == _THINK:
                before_thinking = len(found) if before_thinking is None else before_thinking
            elif mark[0] == _END_OF_THINKING:
                del found[before_thinking or 0 :]  # without a <think> it was the template that opened the thinking
                before_thinking = None
            else:
                found.append(self._block(text, *mark.span(), thinking=before_thinking is not None))
                at = found[-1][1]
        del found[len(found) if before_thinking is None else before_thinking :]
        content, at = "", 0
        for start, end, one in found:
            if isinstance(one, ToolCall):
                content, at = content + text[at:start], end
        calls = [one for _, _, one in found if isinstance(one, ToolCall)]
        malformed = tuple(one for _, _, one in found if isinstance(one, str))
        return AnswerParts(content=content + text[at:], calls=numbered(calls), malformed=malformed)

    def _block(self, text: str, start: int, at: int, *, thinking: bool) -> tuple[int, int, ToolCall | str]:
        stop = ends = text.find(self.end, at)
        for _ in range(_MOST_MARKS):
            if ends < 0 or (not self.quoted and self.begin in text[stop:ends]):
                break
            with contextlib.suppress(ValueError):
                return start, ends + len(self.end), self.read(text[at:ends])
            ends = text.find(self.end, ends + len(self.end))  # that one stood in an argument, perhaps
        end = stop + len(self.end) if stop >= 0 else len(text)
        # a thought that mentions a call ends where the thinking ends, not in a call that is made after it
        closed = text.find(_END_OF_THINKING, at, end)
        if closed >= 0 and (thinking or stop < 0 or self.begin in text[closed:stop]):
            end = closed
        return start, end, text[start:end]


def numbered(calls: list[ToolCall]) -> tuple[ToolCall, ...]:
    return tuple(call if call.id else replace(call, id=f"call_{number}") for number, call in enumerate(calls))


def call_of_json(text: str, *keys: str) -> ToolCall:
    """A call from ``{"name": …, "arguments": {…}}``, the arguments under the first of ``keys`` that is there. Arguments
    may be JSON in a string."""
    value = read_object(text)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("no name")
    arguments = next((value[key] for key in keys if key in value), None)
    arguments = {} if arguments is None else read_object(arguments)
    return ToolCall(name=name, arguments=arguments, id=str(value.get("id") or ""))


def read_object(written: Any) -> dict[str, Any]:
    """An object, or JSON in a string that is one. ``ValueError`` when it is neither."""
    try:
        value = json.loads(written) if isinstance(written, str) else written
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
