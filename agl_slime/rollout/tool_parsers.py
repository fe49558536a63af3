"""Formats of tool calls under the name that plug-ins import them by."""

from agl_slime.tokens.answer import AnswerParts, ToolCall
from agl_slime.tokens.formats import ToolParser, get_tool_parser, register_tool_parser

__all__ = ["AnswerParts", "ToolCall", "ToolParser", "get_tool_parser", "register_tool_parser"]
