"""What a parser of tool calls gives, and the registry of parsers.

A parser never raises and never mends: what looks like a call and cannot be read is ``malformed``, stays in the text as
the model wrote it, and is counted.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agl_slime.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call as the model wrote it. ``arguments`` by name; formats without types give strings, which the tool's
    schema turns into what it wants."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""

    def to_message(self) -> dict[str, Any]:
        """As an entry of ``tool_calls`` in OpenAI's chat messages."""
        arguments = json.dumps(dict(self.arguments), ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """``text`` begins like a call; ``error`` says in a few words why it is none."""

    text: str
    error: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """``content`` is the answer without its well-formed calls; malformed ones are still in it."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()


@dataclass
class _Found:
    calls: list[ToolCall] = field(default_factory=list)
    malformed: list[MalformedCall] = field(default_factory=list)


class ToolParser(ABC):
    """Finds the calls in an answer. Calls inside of thinking are thoughts: what stands before the last ``</think>`` is
    not looked at, nor a block that is still open."""

    name: str = ""

    def parse(self, text: str) -> ParsedAnswer:
        at = text.rfind("</think>")
        start = at + len("</think>") if at >= 0 else 0
        spoken = text[start:]
        if "<think>" in spoken:  # cut off while thinking
            return ParsedAnswer(text)
        found = _Found()
        content = self._take_calls(spoken, found)
        return ParsedAnswer(text[:start] + content, tuple(found.calls), tuple(found.malformed))

    @abstractmethod
    def _take_calls(self, text: str, found: _Found) -> str:
        """Put the calls of ``text`` into ``found``; returns the text without those that are well-formed."""


class BlockParser(ToolParser):
    """A format whose calls stand in blocks between two marks."""

    begin: str
    end: str

    def _take_calls(self, text: str, found: _Found) -> str:
        kept, at = [], 0
        while (start := text.find(self.begin, at)) >= 0:
            kept.append(text[at:start])
            stop = text.find(self.end, start + len(self.begin))
            if stop < 0:
                found.malformed.append(MalformedCall(text[start:], f"{self.begin} without {self.end}"))
                return "".join(kept) + text[start:]
            at = stop + len(self.end)
            try:
                call = self.read(text[start + len(self.begin) : stop])
            except ValueError as error:
                found.malformed.append(MalformedCall(text[start:at], str(error)))
                kept.append(text[start:at])
                continue
            found.calls.append(call if call.id else with_number(call, len(found.calls)))
        return "".join(kept) + text[at:]

    @abstractmethod
    def read(self, block: str) -> ToolCall:
        """The call that a block holds; ``ValueError`` with a few words when it holds none."""


def with_number(call: ToolCall, number: int) -> ToolCall:
    return ToolCall(name=call.name, arguments=call.arguments, id=f"call_{number}")


def call_of_json(text: str, *keys: str) -> ToolCall:
    """A call from ``{"name": …, "arguments": {…}}``, the arguments under the first of ``keys`` that is there. Arguments
    may be JSON in a string."""
    value = read_json(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("no name")
    arguments = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("the arguments are not an object")
    return ToolCall(name=name, arguments=arguments, id=str(value.get("id") or ""))


def read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error


# -- the registry ----------------------------------------------------------------------------------------------------

P = TypeVar("P", bound=Callable[[], ToolParser])

_parsers: dict[str, Callable[[], ToolParser]] = {}


def register_tool_parser(*names: str) -> Callable[[P], P]:
    """Make a parser class known under ``names``."""

    def register(parser: P) -> P:
        for name in names:
            if name in _parsers:
                raise ConfigError(f"a tool parser named {name!r} is registered already; choose another name")
            _parsers[name] = parser
        return parser

    return register


def get_tool_parser(name: str | ToolParser) -> ToolParser:
    """The parser of that name; a parser is given back as it is."""
    if isinstance(name, ToolParser):
        return name
    if name not in _parsers:
        raise ConfigError(f"there is no tool parser {name!r}; there are {', '.join(sorted(_parsers))}")
    return _parsers[name]()


def tool_parser_names() -> list[str]:
    return sorted(_parsers)


def parser_for_template(chat_template: str | None) -> str:
    """The name of the format that a chat template asks the model for; Hermes' when it says nothing."""
    source = chat_template or ""
    for mark, name in (
        ("<|tool_call_argument_begin|>", "kimi"),
        ("<arg_key>", "glm"),
        ("<function=", "qwen_xml"),
        ("<tool_call>", "hermes"),
    ):
        if mark in source:
            return name
    if re.search(r'"parameters":\s', source) and "<|python_tag|>" in source:
        return "llama_json"
    return "hermes"
