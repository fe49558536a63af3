"""Formats that write each argument as text between its own marks, and its conversion to the type of the schema."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agl_slime.tokens.answer import ToolCall
from agl_slime.tokens.formats.base import MAX_ENDS, BlockParser, register_tool_parser, skip_blanks


def _one_of(value: Any, schema: Any) -> Any:
    """The value without the blanks around it, where only so ``enum`` lists it: grammars of XML allow blanks."""
    choices = _listed(schema.get("enum")) if isinstance(schema, Mapping) else []
    return value.strip() if isinstance(value, str) and value not in choices and value.strip() in choices else value


_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_EMPTY: dict[str, Any] = {"array": [], "object": {}, "integer": None, "number": None, "boolean": None, "null": None}
_JSON_TYPES = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"}
_JSON_TYPES |= {list: "array", dict: "object"}


def types_of(schema: Any, root: Mapping[str, Any], _seen: set[int] | None = None) -> tuple[str, ...]:
    """The JSON types that a schema allows, by ``type``, ``anyOf``, ``oneOf``, ``allOf``, ``$ref`` (within ``root``),
    ``enum`` and ``const``; empty without any of them."""
    visited = set() if _seen is None else _seen
    if not isinstance(schema, Mapping) or id(schema) in visited:
        return ()
    visited.add(id(schema))
    types = [kind for kind in _listed(schema.get("type")) if isinstance(kind, str)]
    values = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    if not types:
        types = [_JSON_TYPES[type(value)] for value in values if type(value) in _JSON_TYPES]
    types += ["null"] if schema.get("nullable") else []
    choices = [choice for name in ("anyOf", "oneOf", "allOf") for choice in _listed(schema.get(name))]
    if isinstance(reference := schema.get("$ref"), str):
        target: Any = root
        for key in reference.removeprefix("#/").split("/"):
            target = target.get(key.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        choices.append(target)
    return tuple(dict.fromkeys([*types, *(kind for choice in choices for kind in types_of(choice, root, visited))]))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _typed(value: Any, types: tuple[str, ...]) -> Any:
    """A text as one of ``types`` if it parses as one and is no string."""
    if not isinstance(value, str) or not types:
        return value
    text = value.strip()
    if not text and "string" not in types:
        return _EMPTY.get(types[0], value)
    if text.lower() in _CONSTANTS and (text in ("true", "false", "null") or text != text.lower() or len(types) == 1):
        read = _CONSTANTS[text.lower()]
    elif "string" in types:
        return value
    else:
        try:
            read = _literal(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return value
    numbers = {"integer", "number"}
    kinds = numbers if (kind := _JSON_TYPES.get(type(read))) in numbers else {kind}
    return value if kinds.isdisjoint(types) else read


def _literal(text: str) -> Any:
    """A value in JSON, or in Python's syntax, which templates without ``tojson`` write."""
    try:
        return json.loads(text)
    except ValueError:
        return json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))


class TaggedParser(BlockParser):
    """Calls with tagged arguments: ``head`` matches a call's name after ``begin``, ``key`` an argument's name with the
    mark after it; ``value_end`` ends a value, which may contain end marks if its own end follows. The next key ends a
    value that is not closed, as in SGLang and vLLM; with ``open_last`` so do the marks that end call and section."""

    key: re.Pattern[str]
    value_end: str
    open_last = False

    def read(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        head = self.head.match(text, start)
        if head is None:
            raise ValueError("no name")
        first = end = text.find(self.end, head.end())
        for _ in range(MAX_ENDS):
            if end < 0 or self.begin in text[first:end]:  # the end may be the next call's
                break
            call_end = end + len(self.end)
            open_last = self.open_last and text.startswith(self.closing, skip_blanks(text, call_end))
            try:
                arguments = self._arguments(text[head.end() : end].rstrip(), open_last)
            except ValueError:
                end = text.find(self.end, call_end)  # the end mark may be in an argument
            else:
                return [ToolCall(name=head[1], arguments=arguments)], call_end
        raise ValueError("no arguments that end")

    def _arguments(self, body: str, open_last: bool) -> dict[str, object]:
        arguments: dict[str, object] = {}
        position = 0
        while body[position:].strip():
            key = self.key.match(body, position)
            if key is None:
                raise ValueError("text between the arguments")
            following = self.key.search(body, key.end())
            position = following.start() if following else len(body)
            value = body[key.end() : position]
            if value.rstrip().endswith(self.value_end):
                value = value.rstrip().removesuffix(self.value_end)
            elif self.value_end in value or not (following or open_last):
                raise ValueError("a value without an end")
            arguments[key[1].strip()] = self.value(key, value)
        return arguments

    def value(self, key: re.Match[str], text: str) -> object:
        """The value of an argument from its text."""
        return text

    def convert_types(self, call: ToolCall, parameters: Mapping[str, Any] | None) -> ToolCall:
        root = parameters or {}
        schemas = root.get("properties")
        schemas = schemas if isinstance(schemas, Mapping) else {}
        arguments = {}
        for name, value in call.arguments.items():
            schema = schemas.get(name)
            arguments[name] = _one_of(_typed(value, types_of(schema, root)), schema)
        return replace(call, arguments=arguments)


@register_tool_parser("qwen_xml", "qwen3_coder")
class QwenXmlParser(TaggedParser):
    """``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``: Qwen3-Coder, 3.5 and later,
    Nemotron 3, Step 3.5. Models leave out the first or the last mark, so either makes it a call."""

    begin, end = "<function=", "</function>"
    opening, closing = ("<tool_call>",), ("</tool_call>",)
    ends_thinking = True
    template_marks = ("<function=",)
    head = re.compile(r"([^>\s]+)\s*>")
    key = re.compile(r"\s*<parameter=([^>\s]+)\s*>")
    value_end, open_last = "</parameter>", True
    call_grammar = "<tool_call>\n<function=NAME>\n", "\n</function>\n</tool_call>", "qwen_xml"

    def read(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        calls, end = super().read(text, start)
        if not (self._in_section(text, start) or text.startswith(self.closing, skip_blanks(text, end))):
            raise ValueError("a mention of the form")
        return calls, end

    def value(self, key: re.Match[str], text: str) -> object:
        return text.removeprefix("\n").removesuffix("\n")  # values are on separate lines


@register_tool_parser("seed")
class SeedParser(QwenXmlParser):
    """``qwen_xml`` with other marks, and values without line breaks around them: Seed-OSS."""

    opening, closing = ("<seed:tool_call>",), ("</seed:tool_call>",)
    ends_thinking = False
    template_marks = ("<seed:tool_call>",)
    call_grammar = "<seed:tool_call>\n<function=NAME>\n", "\n</function>\n</seed:tool_call>", "qwen_xml"


@register_tool_parser("glm", "glm45")
class GlmParser(TaggedParser):
    """``<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>``: GLM since 4.5, Ling 3, Laguna."""

    begin, end = "<tool_call>", "</tool_call>"
    ends_thinking = True
    template_marks = ("<arg_key>",)
    head = re.compile(r"\s*([\w./:-]+)\s*(?=<arg_key>|</tool_call>)")
    starts = re.compile(r"\s*([\w./:-]+)\s*(?=<arg_key>)")
    key = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL)
    value_end = "</arg_value>"
    call_grammar = "<tool_call>NAME", "</tool_call>", "glm_xml"


@register_tool_parser("hunyuan")
class HunyuanParser(TaggedParser):
    """GLM's marks with a release name in them: Hunyuan 3."""

    begin, end = "<tool_call:opensource>", "</tool_call:opensource>"
    opening, closing = ("<tool_calls:opensource>",), ("</tool_calls:opensource>",)
    ends_thinking = True
    template_marks = ("<arg_key:opensource>", "<tool_call:opensource>")
    head = re.compile(r"\s*([^\s<]+)\s*<tool_sep:opensource>")
    key = re.compile(r"\s*<arg_key:opensource>(.*?)</arg_key:opensource>\s*<arg_value:opensource>", re.DOTALL)
    value_end = "</arg_value:opensource>"


@register_tool_parser("minimax", "minimax_m2")
class MiniMaxParser(TaggedParser):
    """``<invoke name="f"><parameter name="x">1</parameter></invoke>`` in ``<minimax:tool_call>``: MiniMax M2."""

    begin, end = '<invoke name="', "</invoke>"
    opening, closing, sectioned = ("<minimax:tool_call>",), ("</minimax:tool_call>",), True
    ends_thinking = True
    template_marks = ("<minimax:tool_call>",)
    head = re.compile(r'([^">]+)">')
    key = re.compile(r'\s*<parameter name="([^"]+)">')
    value_end = "</parameter>"
    call_grammar = '<invoke name="NAME">\n', "\n</invoke>", "minimax_xml"
    section = "<minimax:tool_call>\n", "\n</minimax:tool_call>"

    def marks(self) -> tuple[str, ...]:
        return self.opening


@register_tool_parser("deepseek_v32", "deepseek_v4")
class DsmlParser(TaggedParser):
    """MiniMax's marks in DSML, with a flag of each value, string or JSON: DeepSeek V3.2, V4."""

    begin, end = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
    opening = "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"
    closing = "</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"
    template_marks = inner = ("｜DSML｜",)
    head = re.compile(r'([^">]+)">')
    key = re.compile(r'\s*<｜DSML｜parameter name="([^"]+)"(?: string="(true|false)")?>')
    value_end = "</｜DSML｜parameter>"
    call_grammar = '<｜DSML｜invoke name="NAME">\n', "</｜DSML｜invoke>", "deepseek_xml"
    section = "<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"

    def value(self, key: re.Match[str], text: str) -> object:
        if key[2] != "false":
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
