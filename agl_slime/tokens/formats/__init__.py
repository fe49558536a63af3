"""Formats in which models write calls of tools, and which of them a chat template asks for."""

from __future__ import annotations

from typing import Any

from agl_slime.errors import PromptError
from agl_slime.tokens.formats import json_calls as _json_calls
from agl_slime.tokens.formats import xml_calls as _xml_calls
from agl_slime.tokens.formats.base import ToolParser, get_tool_parser, read_object, register_tool_parser
from agl_slime.tokens.formats.untyped import types_of

__all__ = ["ToolParser", "get_tool_parser", "parser_for_template", "read_object", "register_tool_parser", "types_of"]

_REGISTERED = (_json_calls, _xml_calls)
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
