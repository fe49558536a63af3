"""Formats of tool calls, under the module name that plug-ins import."""

from agl_slime.tokens.answer import AnswerParts, ToolCall
from agl_slime.tokens.formats import ToolParser, get_tool_parser, register_tool_parser

__all__ = ["AnswerParts", "ToolCall", "ToolParser", "get_tool_parser", "register_tool_parser"]
