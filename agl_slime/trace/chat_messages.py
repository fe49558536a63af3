"""Chat messages in span attributes: OpenTelemetry's JSON, the older flattened form, and Weave's, all as the messages
that chat templates expect."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from agl_slime.errors import TraceError
from agl_slime.trace import attributes as names
from agl_slime.trace.span_codec import parse_json

ChatMessage = dict[str, Any]

WEAVE_INPUT, WEAVE_OUTPUT = "agentlightning.operation.input", "agentlightning.operation.output"
_ASKED = re.compile(r"(?:gen_ai\.prompt|agentlightning\.operation\.input\.messages)\.\d+\.")
_ANSWERED = re.compile(r"(?:gen_ai\.completion|agentlightning\.operation\.output\.choices)\.\d+\.")


def has_conversation(attributes: Mapping[str, Any]) -> bool:
    """Whether there are messages and an answer to them, readable or not."""
    asked = names.INPUT_MESSAGES in attributes or any(map(_ASKED.match, attributes))
    return asked and (names.OUTPUT_MESSAGES in attributes or any(map(_ANSWERED.match, attributes)))


def request_messages(attributes: Mapping[str, Any]) -> list[ChatMessage]:
    """The messages that the model was sent, in order; empty when there are none. ``TraceError`` when one is damaged or
    holds more than text and tool calls."""
    if names.INPUT_MESSAGES in attributes:
        return _otel_messages(attributes, names.SYSTEM_INSTRUCTIONS) + _otel_messages(attributes, names.INPUT_MESSAGES)
    return _flat_messages(attributes, names.LEGACY_PROMPT) or _flat_messages(attributes, f"{WEAVE_INPUT}.messages")


def answer_messages(attributes: Mapping[str, Any]) -> list[ChatMessage]:
    """The model's answers, one per choice; errors as for ``request_messages``."""
    if names.OUTPUT_MESSAGES in attributes:
        return _otel_messages(attributes, names.OUTPUT_MESSAGES)
    choices = _flat_messages(attributes, names.LEGACY_COMPLETION)
    if choices:
        return choices
    return [
        _plain(choice["message"])
        for choice in _unflatten(attributes, f"{WEAVE_OUTPUT}.choices")
        if isinstance(choice.get("message"), dict)
    ]


def tool_definitions(attributes: Mapping[str, Any]) -> list[Any] | None:
    """The tools that the request offered, as templates take them; ``None`` when there were none."""
    definitions = attributes.get("gen_ai.tool.definitions")
    if isinstance(definitions, str):
        return parse_json(definitions, "gen_ai.tool.definitions")
    functions = _unflatten(attributes, "gen_ai.request.functions")
    if not functions:
        return None
    return [
        {"type": "function", "function": {**function, "parameters": literal(function.get("parameters", {}))}}
        for function in functions
    ]


def literal(value: Any) -> Any:
    """LiteLLM writes lists as the text of a Python or JSON value."""
    if isinstance(value, str) and value[:1] in "[{":
        try:
            return json.loads(value)
        except ValueError:
            try:
                return ast.literal_eval(value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                return value
    return value


def _otel_messages(attributes: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """OpenTelemetry's messages (``role`` and ``parts``) or plain chat messages, written as JSON; the system
    instructions are a list of parts."""
    if not isinstance(attributes.get(name), str):
        return []
    written = parse_json(str(attributes[name]), name)
    if not isinstance(written, list) or not all(isinstance(message, dict) for message in written):
        raise TraceError(f"{name} must be a JSON list of messages")
    if name == names.SYSTEM_INSTRUCTIONS:
        written = [{"role": "system", "parts": written}]
    return [_from_parts(message) if "parts" in message else _plain(message) for message in written]


def _from_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": str(message.get("role", "user")), "content": ""}
    for part in message["parts"]:
        kind = part.get("type")
        if kind == "text":
            plain["content"] += str(part.get("content", ""))
        elif kind == "reasoning":
            plain["reasoning_content"] = plain.get("reasoning_content", "") + str(part.get("content", ""))
        elif kind == "tool_call":
            call = {"name": str(part.get("name", "")), "arguments": literal(part.get("arguments"))}
            plain.setdefault("tool_calls", []).append(
                {"id": str(part.get("id", "")), "type": "function", "function": call}
            )
        elif kind == "tool_call_response":
            result = part.get("response", part.get("result", ""))
            plain["content"] += result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
            plain["tool_call_id"] = str(part.get("id", ""))
        else:
            raise TraceError(
                f"a message of the trace has a part of type {kind!r}; only text and tool calls can be tokenised again"
            )
    if "finish_reason" in message:
        plain["finish_reason"] = message["finish_reason"]
    return plain


def _flat_messages(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    return [_plain(message) for message in _unflatten(attributes, prefix)]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A chat message as templates expect it: text content, tool calls with their arguments as an object."""
    plain = dict(message)
    plain["content"] = _text(plain.get("content"))
    calls = plain.get("tool_calls")
    if calls:
        plain["tool_calls"] = [_tool_call(call) for call in calls]
    else:
        plain.pop("tool_calls", None)
    return plain


def _tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = literal(function.get("arguments"))
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": str(function.get("name", "")), "arguments": arguments},
    }


def _text(content: Any) -> str:
    parts = literal(content) if isinstance(content, str) and content.startswith("[{") else content
    if isinstance(parts, list) and all(isinstance(part, Mapping) and "type" in part for part in parts):
        other = next((part["type"] for part in parts if part["type"] != "text"), None)
        if other is not None:
            raise TraceError(f"a message of the trace has a part of type {other!r}; only text can be tokenised again")
        return "".join(str(part.get("text", "")) for part in parts)
    return "" if content is None else str(content)


def _unflatten(attributes: Mapping[str, Any], prefix: str) -> list[dict[str, Any]]:
    """``prefix.0.a.b: v`` … as a list of nested objects, by number."""
    items: dict[int, dict[str, Any]] = {}
    for key, value in attributes.items():
        if not key.startswith(prefix + "."):
            continue
        number, *path = key[len(prefix) + 1 :].split(".")
        if not number.isdigit() or not path:
            continue
        node = items.setdefault(int(number), {})
        for step in path[:-1]:
            node = node.setdefault(step, {})
            if not isinstance(node, dict):
                raise TraceError(f"attribute {key} stands both for a value and for something that has parts")
        node[path[-1]] = value
    return [_numbered_to_lists(items[number]) for number in sorted(items)]


def _numbered_to_lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    converted = {key: _numbered_to_lists(value) for key, value in node.items()}
    if converted and all(key.isdigit() for key in converted):
        return [converted[key] for key in sorted(converted, key=int)]
    return converted
