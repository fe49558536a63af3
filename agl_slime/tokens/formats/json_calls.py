"""Formats that write arguments as JSON."""

from __future__ import annotations

import re
from typing import Any

from agl_slime.tokens.answer import AnswerParts, ToolCall
from agl_slime.tokens.formats.base import (
    BlockParser,
    ToolParser,
    const,
    json_at,
    number_calls,
    read_object,
    register_tool_parser,
    skip_blanks,
)


def call_of_json(value: Any) -> ToolCall:
    """A call from ``{"name": …, "arguments": {…}}``. Arguments may be JSON in a string."""
    value = read_object(value)
    name = value.get("name") or value.get("tool_name")
    if not isinstance(name, str) or not name:
        raise ValueError("no name")
    arguments = next((value[key] for key in ("arguments", "parameters") if key in value), None)
    arguments = {} if arguments is None else read_object(arguments)
    return ToolCall(name=name, arguments=arguments, id=str(value.get("id") or ""))


def calls_of_json(text: str, position: int, end: str) -> tuple[list[ToolCall], int]:
    """The calls in JSON values, objects or lists of them, up to the mark ``end``; in the first value without a mark."""
    calls: list[ToolCall] = []
    while not calls or (end and not text.startswith(end, position)):
        value, position = json_at(text, position)
        calls += map(call_of_json, value if isinstance(value, list) else [value])
        if not calls:
            raise ValueError("an empty list")
        position = skip_blanks(text, position) if end else position
    return calls, position + len(end)


class JsonBlockParser(BlockParser):
    """A format with names and arguments in JSON between two marks."""

    def read(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        return calls_of_json(text, start, self.end)


@register_tool_parser("hermes", "qwen")
class HermesParser(JsonBlockParser):
    """``<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>``: Hermes, Qwen2.5, Qwen3, Granite 4."""

    begin, end = "<tool_call>", "</tool_call>"
    ends_thinking = True
    template_marks = ("<tool_call>",)
    call_grammar = '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "json"


@register_tool_parser("nemotron_v2")
class NemotronV2Parser(JsonBlockParser):
    """``<TOOLCALL>[{"name": "f", "arguments": {"x": 1}}]</TOOLCALL>``: Nemotron Nano 2."""

    begin, end = "<TOOLCALL>", "</TOOLCALL>"
    template_marks = ("<TOOLCALL>",)
    call_grammar, between = ('{"name": "NAME", "arguments": ', "}", "json"), ", "
    section = "<TOOLCALL>[", "]</TOOLCALL>"


@register_tool_parser("minimax_m1")
class MiniMaxM1Parser(JsonBlockParser):
    """``<tool_calls>`` around lines of JSON objects, or around a list of them: MiniMax M1, Apriel."""

    begin, end = "<tool_calls>", "</tool_calls>"
    template_marks = ("<tool_calls>",)
    call_grammar = '{"name": "NAME", "arguments": ', "}", "json"
    section = "<tool_calls>\n", "\n</tool_calls>"


@register_tool_parser("cohere")
class CohereParser(JsonBlockParser):
    """``<|START_ACTION|>[{"tool_name": "f", "parameters": {"x": 1}}]<|END_ACTION|>``: Command R7B, A."""

    begin, end = "<|START_ACTION|>", "<|END_ACTION|>"
    ends_thinking = True
    template_marks = ("<|START_ACTION|>",)


@register_tool_parser("mistral")
class MistralParser(BlockParser):
    """``[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]``, and ``[TOOL_CALLS]f[ARGS]{"x": 1}`` of newer models."""

    begin = "[TOOL_CALLS]"
    template_marks = ("[TOOL_CALLS]",)
    inner = "[ARGS]", "[CALL_ID]"
    call_grammar, between = ('{"name": "NAME", "arguments": ', "}", "json"), ", "
    section = "[TOOL_CALLS][", "]"
    starts = re.compile(r"\s*(?:[\[{]|[\w./-]+\s*(?:\[CALL_ID\]|\[ARGS\]|\{))")
    head = re.compile(r"\s*([\w./-]+)\s*(?:\[CALL_ID\]\s*(\w+)\s*)?(?:\[ARGS\])?\s*(?=\{)")

    def read(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        head = self.head.match(text, start)
        if head is None:
            return calls_of_json(text, start, "")
        value, end = json_at(text, head.end())
        return [ToolCall(name=head[1], arguments=read_object(value), id=head[2] or "")], end


@register_tool_parser("mistral_args")
class MistralArgsParser(MistralParser):
    """``[TOOL_CALLS]f[ARGS]{"x": 1}``: Mistral Small 3.2, Ministral 3, Devstral."""

    template_marks = ("[ARGS]",)
    call_grammar, between, section = ("[TOOL_CALLS]NAME[ARGS]", "", "json"), "", ("", "")


class NamedJsonParser(BlockParser):
    """A format with names (in ``head``) before the JSON of the arguments, and the marks ``tail`` before ``end``."""

    tail: tuple[str, ...] = ()

    def read(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        head = self.head.match(text, start)
        if head is None:
            raise ValueError("no name")
        value, position = json_at(text, head.end())
        for mark in (*self.tail, self.end):
            position = skip_blanks(text, position)
            if not text.startswith(mark, position):
                raise ValueError("the call is not closed")
            position += len(mark)
        call = ToolCall(name=head["name"], arguments=read_object(value), id=head.groupdict().get("id") or "")
        return [call], position


@register_tool_parser("kimi", "kimi_k2")
class KimiParser(NamedJsonParser):
    """``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>``: Kimi K2."""

    begin, end = "<|tool_call_begin|>", "<|tool_call_end|>"
    ends_thinking = True
    opening = "<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"
    closing = "<|tool_calls_section_end|>", "<|tool_call_section_end|>"
    template_marks = inner = ("<|tool_call_argument_begin|>",)
    head = re.compile(r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<:]*[\w-])(?::\d+)?)\s*<\|tool_call_argument_begin\|>")
    call_grammar = "<|tool_call_begin|>functions.NAME:", "<|tool_call_end|>", "json"
    section, between = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), ""

    def arguments(self, schema: Any, style: str) -> dict[str, Any]:
        """Calls are numbered."""
        number = [{"type": "regex", "pattern": "[0-9]{1,3}"}, const("<|tool_call_argument_begin|>")]
        return {"type": "sequence", "elements": [*number, super().arguments(schema, style)]}


class _DeepSeekParser(NamedJsonParser):
    begin, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    opening, closing = ("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",)
    inner = ("<｜tool▁sep｜>",)
    section = opening[0], closing[0]


@register_tool_parser("deepseek_v3", "deepseek_r1")
class DeepSeekV3Parser(_DeepSeekParser):
    """The type ``function``, a separator, the name in a line and arguments in a fence of JSON: DeepSeek V3, R1."""

    template_marks = ("<｜tool▁sep｜>",)
    head = re.compile(r"\s*function<｜tool▁sep｜>(?P<name>[^\n<`]+)\n```json\s*")
    tail = ("```",)
    call_grammar = ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>", "json")


@register_tool_parser("deepseek_v31")
class DeepSeekV31Parser(_DeepSeekParser):
    """The name, a separator and the arguments: DeepSeek V3.1."""

    template_marks = ("<｜tool▁sep｜>",)
    head = re.compile(r"\s*(?P<name>[^\s<]+)\s*<｜tool▁sep｜>")
    call_grammar, between = ("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "json"), ""


@register_tool_parser("solar")
class SolarParser(NamedJsonParser):
    """An id, the name and the arguments, each after a mark: Solar Open."""

    begin, end = "<|tool_call:begin|>", "<|tool_call:end|>"
    opening, closing = ("<|tool_calls|>",), ()
    template_marks = ("<|tool_call:begin|>",)
    head = re.compile(r"\s*(?P<id>\w*)\s*<\|tool_call:name\|>(?P<name>[^\s<]+)<\|tool_call:args\|>")


@register_tool_parser("functionary")
class FunctionaryParser(NamedJsonParser):
    """``<function=f>{"x": 1}</function>``: Functionary 3.1, and Llama 3.1 with custom tools."""

    begin, end = "<function=", "</function>"
    template_marks = ("<function=",)
    head = re.compile(r"(?P<name>[^>\s<]+)>\s*(?=\{)")
    call_grammar, between = ("<function=NAME>", "</function>", "json"), ""


@register_tool_parser("llama_json", "llama3")
class LlamaJsonParser(ToolParser):
    """A whole answer ``{"name": "f", "parameters": {"x": 1}}``, several separated by ``;``, possibly after text and
    ``<|python_tag|>``: Llama 3.1 and later."""

    template_marks = "<|python_tag|>", "Environment: ipython"
    call_grammar, between = ('{"name": "NAME", "parameters": ', "}", "json"), "; "
    _tag = "<|python_tag|>"

    def parse(self, text: str) -> AnswerParts:
        starts = [match.end() for match in re.finditer(re.escape(self._tag), text)]
        bare = text.lstrip().startswith("{") and '"name"' in text  # else it is an answer that happens to be JSON
        for start in [0] * bare + starts:
            try:
                content = text[:start].removesuffix(self._tag)
                return AnswerParts(content=content, calls=number_calls(self._read(text, start)))
            except (ValueError, RecursionError):
                continue
        unread = [0] * bare + [start for start in starts if text.startswith("{", skip_blanks(text, start))]
        return AnswerParts(content=text, malformed=(text[unread[0] :],) if unread else ())

    def _read(self, text: str, position: int) -> list[ToolCall]:
        calls: list[ToolCall] = []
        while position < len(text.rstrip()):
            value, position = json_at(text, position)
            calls.append(call_of_json(value))
            position += len(text[position:]) - len(text[position:].lstrip("; \n"))
        if not calls:
            raise ValueError("no call")
        return calls
