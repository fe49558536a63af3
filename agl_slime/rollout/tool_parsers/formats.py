"""The formats in which models write tool calls."""

from __future__ import annotations

import json
import re
from typing import Any

from agl_slime.rollout.tool_parsers.base import (
    BlockParser,
    MalformedCall,
    ToolCall,
    ToolParser,
    _Found,
    call_of_json,
    read_json,
    register_tool_parser,
    with_number,
)


@register_tool_parser("hermes", "qwen")
class HermesParser(BlockParser):
    """``<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>``: Hermes, Qwen2.5, Qwen3."""

    begin, end = "<tool_call>", "</tool_call>"

    def read(self, block: str) -> ToolCall:
        return call_of_json(block, "arguments", "parameters")


@register_tool_parser("qwen_xml", "qwen3_coder")
class QwenXmlParser(BlockParser):
    """``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``: Qwen3-Coder, Qwen3.5. Values are
    strings."""

    begin, end = "<tool_call>", "</tool_call>"
    _function = re.compile(r"\s*<function=([^>\s]+)\s*>(.*)</function>\s*", re.DOTALL)
    _parameter = re.compile(r"\s*<parameter=([^>\s]+)\s*>(.*?)</parameter>\s*", re.DOTALL)

    def read(self, block: str) -> ToolCall:
        found = self._function.fullmatch(block)
        if found is None:
            raise ValueError("no <function=…>…</function>")
        name, body = found.groups()
        arguments: dict[str, Any] = {}
        at = 0
        while at < len(body) and body[at:].strip():
            parameter = self._parameter.match(body, at)
            if parameter is None:
                raise ValueError("text between the parameters")
            # the format puts values on lines of their own
            arguments[parameter[1]] = parameter[2].removeprefix("\n").removesuffix("\n")
            at = parameter.end()
        return ToolCall(name=name, arguments=arguments)


@register_tool_parser("glm", "glm45")
class GlmParser(BlockParser):
    """``<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>``: GLM-4.5 and later. Values are strings."""

    begin, end = "<tool_call>", "</tool_call>"
    _pair = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL)

    def read(self, block: str) -> ToolCall:
        name, mark, rest = block.partition("<arg_key>")
        name = name.strip()
        if not re.fullmatch(r"[\w.:-]+", name):
            raise ValueError("no name")
        body, arguments, at = mark + rest, {}, 0
        while at < len(body):
            pair = self._pair.match(body, at)
            if pair is None:
                raise ValueError("text between the arguments")
            arguments[pair[1].strip()] = pair[2]
            at = pair.end()
        return ToolCall(name=name, arguments=arguments)


@register_tool_parser("kimi", "kimi_k2")
class KimiParser(BlockParser):
    """``<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"x": 1}<|tool_call_end|>``, in a section: Kimi K2."""

    begin, end = "<|tool_call_begin|>", "<|tool_call_end|>"
    _sections = re.compile(r"<\|tool_calls_section_(?:begin|end)\|>")
    _id = re.compile(r"\s*(?:functions\.)?([\w-]+)(?::\d+)?\s*")

    def _take_calls(self, text: str, found: _Found) -> str:
        content = super()._take_calls(text, found)
        return content if found.malformed else self._sections.sub("", content)

    def read(self, block: str) -> ToolCall:
        head, mark, body = block.partition("<|tool_call_argument_begin|>")
        name = self._id.fullmatch(head)
        if not mark or name is None:
            raise ValueError("no <|tool_call_argument_begin|> after the name")
        arguments = read_json(body)
        if not isinstance(arguments, dict):
            raise ValueError("the arguments are not an object")
        return ToolCall(name=name[1], arguments=arguments, id=head.strip())


@register_tool_parser("llama_json", "llama3")
class LlamaJsonParser(ToolParser):
    """The whole answer is ``{"name": "f", "parameters": {"x": 1}}``, several with ``;`` between them, perhaps after
    ``<|python_tag|>``: Llama 3.1 and later."""

    _tag = "<|python_tag|>"

    def _take_calls(self, text: str, found: _Found) -> str:
        before, tag, after = text.partition(self._tag)
        body = (after if tag else before).strip()
        said = before if tag else ""
        if not body.startswith("{") or not (tag or '"name"' in body):
            return text  # an answer that happens to be JSON, or no JSON at all
        calls: list[ToolCall] = []
        at, decoder = 0, json.JSONDecoder()
        try:
            while at < len(body):
                _, end = decoder.raw_decode(body, at)
                calls.append(call_of_json(body[at:end], "parameters", "arguments"))
                at = end + len(body[end:]) - len(body[end:].lstrip("; \n"))
        except (ValueError, RecursionError) as error:
            found.malformed.append(MalformedCall(text, str(error) or "JSON that is nested too deeply"))
            return text
        found.calls += [call if call.id else with_number(call, number) for number, call in enumerate(calls)]
        return said
