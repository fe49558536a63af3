"""Tool calls in the text of answers, in the formats that models are trained on.

A parser never raises and never mends: what looks like a call and cannot be read is ``malformed``, stays in the text as
the model wrote it, and is counted.
"""

from __future__ import annotations

import contextlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agl_slime.errors import PromptError
from agl_slime.support.registry import Registry

_THINK, _END_OF_THINKING = "<think>", "</think>"
_MOST_MARKS = 16  # ends that are tried for one call


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call as the model wrote it; formats without types give strings, which the tool's schema turns into others."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""

    def to_message(self) -> dict[str, Any]:
        """As an entry of ``tool_calls`` in OpenAI's chat messages."""
        arguments = json.dumps(dict(self.arguments), ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """``content`` is the answer without its well-formed calls. ``malformed`` are the texts that begin like a call and
    are none; they are still in the content."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()


class ToolParser(ABC):
    """Finds the calls in an answer. Calls inside of thinking are thoughts, and not made."""

    written: tuple[str, str, str] | None = None
    """What stands before and after a call's arguments, with ``NAME`` for the function's, and xgrammar's word for how
    those are written; ``None`` where a grammar cannot say it."""
    between = "\n"  # two calls

    @abstractmethod
    def parse(self, text: str) -> ParsedAnswer: ...

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

    def parse(self, text: str) -> ParsedAnswer:
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
        return ParsedAnswer(content + text[at:], _numbered(calls), malformed)

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


def _numbered(calls: list[ToolCall]) -> tuple[ToolCall, ...]:
    return tuple(call if call.id else replace(call, id=f"call_{number}") for number, call in enumerate(calls))


def _call_of_json(text: str, *keys: str) -> ToolCall:
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


_FORMATS = {"<|tool_call_argument_begin|>": "kimi", "<arg_key>": "glm", "<function=": "qwen_xml"}
_FORMATS |= {"<tool_call>": "hermes", "<|python_tag|>": "llama_json"}
# formats of which there is no parser, by what only their templates have
_UNREAD = {"<|channel|>": "gpt-oss", "<minimax:tool_call>": "MiniMax", "<tool_calls>": "MiniMax"}
_UNREAD |= {"[TOOL_CALLS]": "Mistral", "<｜tool▁call": "DeepSeek"}


def parser_for_template(chat_template: Any, *, offered: bool = True) -> str:
    """The name of the format that a chat template asks the model for; Hermes' when it says nothing or is no text.
    Raises ``PromptError`` for one that cannot be read, where tools are ``offered``."""
    source = chat_template if isinstance(chat_template, str) else ""
    found = next((name for mark, name in _FORMATS.items() if mark in source), None)
    if offered and found is None and (model := next((name for mark, name in _UNREAD.items() if mark in source), None)):
        fix = "register a parser (agl_slime.rollout.tool_parsers) for an agent of your own, or give no tools"
        raise PromptError(f"the chat template asks for tool calls in {model}'s format, which is not parsed here; {fix}")
    return found or "hermes"


@register_tool_parser("hermes", "qwen")
class HermesParser(BlockParser):
    """``<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>``: Hermes, Qwen2.5, Qwen3."""

    begin, end, quoted = "<tool_call>", "</tool_call>", True
    written = '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "json"

    def read(self, block: str) -> ToolCall:
        return _call_of_json(block, "arguments", "parameters")


class UntypedParser(BlockParser):
    """A format that writes all values as text."""

    def typed(self, call: ToolCall, parameters: Mapping[str, Any] | None) -> ToolCall:
        root = parameters or {}
        schemas = root.get("properties")
        schemas = schemas if isinstance(schemas, Mapping) else {}
        arguments = {name: _typed(value, types_of(schemas.get(name), root)) for name, value in call.arguments.items()}
        return replace(call, arguments=arguments)


# JSON's, and those of Python, which templates write that have no JSON for them
_CONSTANTS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_JSON_TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"}
_JSON_TYPES |= {list: "array", dict: "object"}


def types_of(schema: Any, root: Mapping[str, Any], _seen: set[int] | None = None) -> tuple[str, ...]:
    """The JSON types that a schema allows, by ``type``, ``anyOf`` and its kin, ``$ref`` (within ``root``), ``enum`` and
    ``const``; none where it does not say."""
    seen = set() if _seen is None else _seen
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return ()
    seen.add(id(schema))
    types = [kind for kind in _listed(schema.get("type")) if isinstance(kind, str)]
    values = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    if not types:
        types = [_JSON_TYPES[type(value)] for value in values if type(value) in _JSON_TYPES]
    types += ["null"] if schema.get("nullable") else []
    inner = [each for name in ("anyOf", "oneOf", "allOf") for each in _listed(schema.get(name))]
    if isinstance(reference := schema.get("$ref"), str):
        target: Any = root
        for key in reference.removeprefix("#/").split("/"):
            target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        inner.append(target)
    return tuple(dict.fromkeys([*types, *(kind for each in inner for kind in types_of(each, root, seen))]))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _typed(value: Any, types: tuple[str, ...]) -> Any:
    """``value``, a text, as one of ``types``, where it reads as that and not as a string."""
    if not isinstance(value, str) or not types:
        return value
    text = value.strip()
    if text in _CONSTANTS:
        read = _CONSTANTS[text]
    elif "string" in types:
        return value
    else:
        try:
            read = json.loads(text)
        except (ValueError, RecursionError):
            return value
    numbers = {"integer", "number"}
    kinds = numbers if (kind := _JSON_TYPES[type(read)]) in numbers else {kind}
    return value if kinds.isdisjoint(types) else read


@register_tool_parser("qwen_xml", "qwen3_coder")
class QwenXmlParser(UntypedParser):
    """``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5. Values are
    strings."""

    begin, end = "<tool_call>", "</tool_call>"
    written = "<tool_call>\n<function=NAME>\n", "\n</function>\n</tool_call>", "qwen_xml"
    _function = re.compile(r"\s*<function=([^>\s]+)\s*>(.*)</function>\s*", re.DOTALL)
    _parameter = re.compile(r"\s*<parameter=([^>\s]+)\s*>(.*?)</parameter>\s*", re.DOTALL)

    def read(self, block: str) -> ToolCall:
        found = self._function.fullmatch(block)
        if found is None:
            raise ValueError("no <function=…>…</function>")
        name, body = found.groups()
        # the format puts values on lines of their own
        pairs = _pairs(self._parameter, body)
        arguments = {key: value.removeprefix("\n").removesuffix("\n") for key, value in pairs.items()}
        return ToolCall(name=name, arguments=arguments)


@register_tool_parser("glm", "glm45")
class GlmParser(UntypedParser):
    """``<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>``: GLM since 4.5. Values are strings."""

    begin, end = "<tool_call>", "</tool_call>"
    written = "<tool_call>NAME", "</tool_call>", "glm_xml"
    _pair = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)

    def read(self, block: str) -> ToolCall:
        name, mark, rest = block.partition("<arg_key>")
        name = name.strip()
        if not re.fullmatch(r"[\w.:-]+", name):
            raise ValueError("no name")
        return ToolCall(name=name, arguments=_pairs(self._pair, mark + rest))


def _pairs(pair: re.Pattern[str], body: str) -> dict[str, str]:
    """``body`` as one ``pair`` after the other; ``ValueError`` when there is anything else in it."""
    arguments, at = {}, 0
    while at < len(body) and body[at:].strip():
        found = pair.match(body, at)
        if found is None:
            raise ValueError("text between the arguments")
        arguments[found[1].strip()] = found[2]
        at = found.end()
    return arguments


@register_tool_parser("kimi", "kimi_k2")
class KimiParser(BlockParser):
    """``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>``: Kimi K2."""

    begin, end, quoted = "<|tool_call_begin|>", "<|tool_call_end|>", True
    written = "<|tool_call_begin|>functions.NAME:", "<|tool_call_end|>", "json"
    between = ""
    _sections = re.compile(r"<\|tool_calls_section_(?:begin|end)\|>")
    _id = re.compile(r"\s*(?:functions\.)?([\w-]+)(?::\d+)?\s*")

    def marks(self) -> tuple[str, ...]:
        return "<|tool_calls_section_begin|>", self.begin

    def read(self, block: str) -> ToolCall:
        head, mark, body = block.partition("<|tool_call_argument_begin|>")
        name = self._id.fullmatch(head)
        if not mark or name is None:
            raise ValueError("no <|tool_call_argument_begin|> after the name")
        return ToolCall(name=name[1], arguments=read_object(body), id=head.strip())

    def forced(self, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Calls are numbered, and stand in a section."""
        calls = super().forced(functions)
        assert calls is not None
        number = [{"type": "regex", "pattern": "[0-9]{1,3}"}, _const("<|tool_call_argument_begin|>")]
        for tag in calls["tags"]:
            tag["content"] = {"type": "sequence", "elements": [*number, tag["content"]]}
        section = [_const(f"<|tool_calls_section_{mark}|>") for mark in ("begin", "end")]
        return {"type": "sequence", "elements": [section[0], calls, section[1]]}

    def parse(self, text: str) -> ParsedAnswer:
        parsed = super().parse(text)
        return parsed if parsed.malformed else replace(parsed, content=self._sections.sub("", parsed.content))


def _const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


@register_tool_parser("llama_json", "llama3")
class LlamaJsonParser(ToolParser):
    """The whole answer is ``{"name": "f", "parameters": {"x": 1}}``, several with ``;`` between them, perhaps after
    ``<|python_tag|>``: Llama 3.1 and later."""

    written, between = ('{"name": "NAME", "parameters": ', "}", "json"), "; "
    _tag = "<|python_tag|>"

    def parse(self, text: str) -> ParsedAnswer:
        malformed: list[str] = []
        # calls go on to the end of the answer, so the first place from which they do is where the thinking ended
        starts = [0, *(mark.end() for mark in re.finditer(_END_OF_THINKING, text))]
        for start in starts:
            before, tag, after = text[start:].partition(self._tag)
            body = (after if tag else before).strip()
            said = text[:start] + (before if tag else "")
            if not body.startswith("{") or not (tag or '"name"' in body):
                continue  # an answer that happens to be JSON, or no JSON at all
            if said.rfind(_THINK) > said.rfind(_END_OF_THINKING):
                continue
            try:
                return ParsedAnswer(said, _numbered(self._read(body)))
            except (ValueError, RecursionError):
                if not said.strip() or start == starts[-1]:  # else it may be a thought
                    malformed.append(text[start:])
        return ParsedAnswer(text, (), tuple(malformed[:1]))

    def _read(self, body: str) -> list[ToolCall]:
        calls: list[ToolCall] = []
        at, decoder = 0, json.JSONDecoder()
        while at < len(body):
            _, end = decoder.raw_decode(body, at)
            calls.append(_call_of_json(body[at:end], "parameters", "arguments"))
            at = end + len(body[end:]) - len(body[end:].lstrip("; \n"))
        return calls
