"""Formats that write each argument between marks of its own, without types."""

from __future__ import annotations

import re

from agl_slime.tokens.answer import ToolCall
from agl_slime.tokens.formats.base import register_tool_parser
from agl_slime.tokens.formats.untyped import UntypedParser


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
