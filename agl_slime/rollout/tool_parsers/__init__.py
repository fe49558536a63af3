"""Tool calls in the text of answers, in the formats that models are trained on."""

from agl_slime.rollout.tool_parsers import formats
from agl_slime.rollout.tool_parsers.base import (
    MalformedCall,
    ParsedAnswer,
    ToolCall,
    ToolParser,
    get_tool_parser,
    parser_for_template,
    register_tool_parser,
    tool_parser_names,
)

assert formats  # imported for what it registers

__all__ = [
    "MalformedCall",
    "ParsedAnswer",
    "ToolCall",
    "ToolParser",
    "get_tool_parser",
    "parser_for_template",
    "register_tool_parser",
    "tool_parser_names",
]
