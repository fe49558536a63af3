"""Formats that write each argument as text between its own marks."""

from __future__ import annotations

import json
import re

from agl_slime.tokens.answer import ToolCall
from agl_slime.tokens.formats.base import register_tool_parser
from agl_slime.tokens.formats.untyped import UntypedParser

_MAX_ENDS = 16  # end marks that are tried for one call


class TaggedParser(UntypedParser):
    """``head`` matches a call's name after ``begin``, ``key`` an argument's name with the mark after it; ``value_end``
    ends its value, ``tail`` precedes ``end``. A value may contain end marks if its own end follows in its place. The
    next key ends a value that is not closed, as in SGLang and vLLM."""

    head: re.Pattern[str]
    key: re.Pattern[str]
    value_end: str
    tail = ""

    def read(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        head = self.head.match(text, at)
        if head is None:
            raise ValueError("no name")
        first = end = text.find(self.end, head.end())
        for _ in range(_MAX_ENDS):
            if end < 0 or self.begin in text[first:end]:  # the end may be the next call's
                break
            body = text[head.end() : end].rstrip()
            if body.endswith(self.tail):
                try:
                    arguments = self._arguments(body.removesuffix(self.tail))
                except ValueError:
                    pass  # the end mark may be in an argument
                else:
                    return [ToolCall(name=head[1], arguments=arguments)], end + len(self.end)
            end = text.find(self.end, end + len(self.end))
        raise ValueError("no arguments that end")

    def _arguments(self, body: str) -> dict[str, object]:
        arguments: dict[str, object] = {}
        at = 0
        while body[at:].strip():
            key = self.key.match(body, at)
            if key is None:
                raise ValueError("text between the arguments")
            following = self.key.search(body, key.end())
            at = following.start() if following else len(body)
            value = body[key.end() : at]
            if value.rstrip().endswith(self.value_end):
                value = value.rstrip().removesuffix(self.value_end)
            elif self.value_end in value or not (following or self.tail):
                raise ValueError("a value without an end")
            arguments[key[1].strip()] = self.value(key, value)
        return arguments

    def value(self, key: re.Match[str], text: str) -> object:
        """The value of an argument from its text."""
        return text


@register_tool_parser("qwen_xml", "qwen3_coder")
class QwenXmlParser(TaggedParser):
    """``<tool_call><function=f><parameter=x>1</parameter></function></tool_call>``: Qwen3-Coder, 3.5 and later,
    Nemotron 3, Step 3.5."""

    begin, end = "<tool_call>", "</tool_call>"
    template_marks = ("<function=",)
    head = re.compile(r"\s*<function=([^>\s]+)\s*>")
    starts = re.compile(r"\s*<function=")
    key = re.compile(r"\s*<parameter=([^>\s]+)\s*>")
    value_end, tail = "</parameter>", "</function>"
    call_grammar = "<tool_call>\n<function=NAME>\n", "\n</function>\n</tool_call>", "qwen_xml"

    def value(self, key: re.Match[str], text: str) -> object:
        return text.removeprefix("\n").removesuffix("\n")  # values are on separate lines


@register_tool_parser("seed")
class SeedParser(QwenXmlParser):
    """``qwen_xml`` with other marks, and values without line breaks around them: Seed-OSS."""

    begin, end = "<seed:tool_call>", "</seed:tool_call>"
    template_marks = ("<seed:tool_call>",)
    call_grammar = "<seed:tool_call>\n<function=NAME>\n", "\n</function>\n</seed:tool_call>", "qwen_xml"


@register_tool_parser("glm", "glm45")
class GlmParser(TaggedParser):
    """``<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>``: GLM since 4.5, Ling 3, Laguna."""

    begin, end = "<tool_call>", "</tool_call>"
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
    template_marks = ("<arg_key:opensource>", "<tool_call:opensource>")
    head = re.compile(r"\s*([^\s<]+)\s*<tool_sep:opensource>")
    starts = head
    key = re.compile(r"\s*<arg_key:opensource>(.*?)</arg_key:opensource>\s*<arg_value:opensource>", re.DOTALL)
    value_end = "</arg_value:opensource>"


@register_tool_parser("minimax", "minimax_m2")
class MiniMaxParser(TaggedParser):
    """``<invoke name="f"><parameter name="x">1</parameter></invoke>`` in ``<minimax:tool_call>``: MiniMax M2."""

    begin, end = '<invoke name="', "</invoke>"
    opening, closing, sectioned = ("<minimax:tool_call>",), ("</minimax:tool_call>",), True
    template_marks = ("<minimax:tool_call>",)
    head = re.compile(r'([^">]+)">')
    starts = head
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
    starts = head
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
