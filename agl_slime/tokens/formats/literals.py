"""Formats that write a call in the syntax of a programming language."""

from __future__ import annotations

import ast
import re
from typing import Any

from agl_slime.tokens.answer import ToolCall
from agl_slime.tokens.formats.base import MAX_ENDS, BlockParser, read_object, register_tool_parser, skip_blanks
from agl_slime.tokens.formats.json_calls import calls_of_json

_CONSTANTS = {"true": True, "false": False, "null": None, "None": None}


@register_tool_parser("lfm2", "pythonic")
class Lfm2Parser(BlockParser):
    """``<|tool_call_start|>[f(x=1), g()]<|tool_call_end|>``: LFM2; newer models may write JSON between the marks."""

    begin, end = "<|tool_call_start|>", "<|tool_call_end|>"
    template_marks = "<|tool_call_start|>", "<|tool_list_start|>"

    def read(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        if re.compile(r"\s*\[?\s*\{").match(text, start):
            return calls_of_json(text, start, self.end)
        end = text.find(self.end, start)
        for _ in range(MAX_ENDS):
            if end < 0:
                break
            try:
                return _calls_of_python(text[start:end].strip()), end + len(self.end)
            except (ValueError, SyntaxError, MemoryError):
                end = text.find(self.end, end + len(self.end))  # the end mark may be in a string
        raise ValueError("no calls")


def _calls_of_python(written: str) -> list[ToolCall]:
    try:
        tree = ast.parse(written, mode="eval").body
    except SyntaxError:  # the model's own template writes line breaks in strings as they are
        tree = ast.parse(written.replace("\n", "\\n"), mode="eval").body
    calls = []
    for call in tree.elts if isinstance(tree, ast.List) else [tree]:
        if not isinstance(call, ast.Call) or call.args or (not call.keywords and not isinstance(call.func, ast.expr)):
            raise ValueError("no call by names of arguments")
        arguments = {}
        for keyword in call.keywords:
            if keyword.arg is None:
                raise ValueError("an argument without a name")
            arguments[keyword.arg] = _value(keyword.value)
        calls.append(ToolCall(name=ast.unparse(call.func), arguments=arguments))
    if not calls:
        raise ValueError("an empty list")
    return calls


def _value(node: ast.expr) -> Any:
    """The value of a literal; constants may be spelled as in JSON."""
    match node:
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=values) | ast.Tuple(elts=values):
            return [_value(value) for value in values]
        case ast.Dict(keys=keys, values=values):
            return {str(_value(key)): _value(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise ValueError("no literal")


@register_tool_parser("gemma4")
class Gemma4Parser(BlockParser):
    """``<|tool_call>call:f{x:1,y:<|"|>text<|"|>}<tool_call|>``: Gemma 4. Models leave out the first mark; an answer
    that is a call and nothing else may lack both."""

    begin, end = "call:", "<tool_call|>"
    opening = template_marks = ("<|tool_call>",)
    tokens = "<|tool_call>", "<tool_call|>", '<|"|>'  # type: ignore[assignment]
    head = re.compile(r"([^\s{<]+)\s*(?=\{)")
    _key = re.compile(r'\s*(?:<\|"\|>(.*?)<\|"\|>|([^\s:,{}\[\]]+))\s*:', re.DOTALL)
    _plain = re.compile(r"[^,{}\[\]<]+")
    _quote = '<|"|>'

    def read(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        head = self.head.match(text, start)
        if head is None:
            raise ValueError("no name")
        arguments, value_end = self._value(text, head.end())
        end = skip_blanks(text, value_end)
        if text.startswith(self.end, end):
            end += len(self.end)
        elif end < len(text) or text[: head.start()].strip() != self.begin:
            raise ValueError("the call is not closed")
        return [ToolCall(name=head[1], arguments=read_object(arguments))], end

    def _value(self, text: str, position: int) -> tuple[Any, int]:
        position = skip_blanks(text, position)
        if text.startswith(self._quote, position):
            start = position + len(self._quote)
            end = text.index(self._quote, start)
            return text[start:end], end + len(self._quote)
        if text.startswith(("{", "["), position):
            return self._items(text, position)
        plain = self._plain.match(text, position)
        if plain is None:
            raise ValueError("no value")
        return _plain_value(plain[0].strip()), plain.end()

    def _items(self, text: str, position: int) -> tuple[Any, int]:
        keyed = text[position] == "{"
        close = "}" if keyed else "]"
        pairs: list[tuple[Any, Any]] = []
        position = skip_blanks(text, position + 1)
        while not text.startswith(close, position):
            key = self._key.match(text, position) if keyed else None
            if keyed and key is None:
                raise ValueError("no key")
            value, position = self._value(text, key.end() if key else position)
            pairs.append(((key[1] if key[1] is not None else key[2]) if key else None, value))
            position = skip_blanks(text, position)
            if text.startswith(",", position):
                position = skip_blanks(text, position + 1)
            elif not text.startswith(close, position):
                raise ValueError("no end")
        return (dict(pairs) if keyed else [value for _, value in pairs]), position + 1


def _plain_value(text: str) -> Any:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
