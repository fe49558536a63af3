"""Formats that write arguments as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agl_slime.tokens.answer import AnswerParts, ToolCall
from agl_slime.tokens.formats.base import (
    BlockParser,
    ToolParser,
    call_of_json,
    numbered,
    read_object,
    register_tool_parser,
)

_THINK, _END_OF_THINKING = "<think>", "</think>"


@register_tool_parser("hermes", "qwen")
class HermesParser(BlockParser):
    """``<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>``: Hermes, Qwen2.5, Qwen3."""

    begin, end, quoted = "<tool_call>", "</tool_call>", True
    written = '<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "json"

    def read(self, block: str) -> ToolCall:
        return call_of_json(block, "arguments", "parameters")


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

    def parse(self, text: str) -> AnswerParts:
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

    def parse(self, text: str) -> AnswerParts:
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
                return AnswerParts(content=said, calls=numbered(self._read(body)))
            except (ValueError, RecursionError):
                if not said.strip() or start == starts[-1]:  # else it may be a thought
                    malformed.append(text[start:])
        return AnswerParts(content=text, malformed=tuple(malformed[:1]))

    def _read(self, body: str) -> list[ToolCall]:
        calls: list[ToolCall] = []
        at, decoder = 0, json.JSONDecoder()
        while at < len(body):
            _, end = decoder.raw_decode(body, at)
            calls.append(call_of_json(body[at:end], "parameters", "arguments"))
            at = end + len(body[end:]) - len(body[end:].lstrip("; \n"))
        return calls
