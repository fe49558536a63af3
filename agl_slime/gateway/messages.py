"""Chat messages of clients in the form that templates get, and keys by which equal messages are recognized.

Clients change a history in small ways: contents as a string or as parts, white space at the end, re-serialized
arguments of calls, reasoning left out. The keys ignore these. An answer is recognized by the ids of its tool calls
first, which the gateway made and clients keep; then by its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.files import FILE_KINDS, file_text
from agl_slime.gateway.images import joined

Message = dict[str, Any]

_ROLES = {"developer": "system", "function": "tool"}
_TEMPLATE_ROLES = frozenset({"system", "user", "assistant", "tool"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
_TRANSPORT = re.compile(r"\Ax-anthropic-billing-header:(?: \w+=[^;\n]*;)*[\n ]?")
"""The text of Claude Code before the system prompt for its vendor's server, with a hash of the request in 2.1.117;
CLAUDE_CODE_ATTRIBUTION_HEADER=0 leaves it out."""
_PLACEHOLDERS = frozenset({"", "(no content)", "[No message content]", "(empty content)"})
_PLACEHOLDERS |= {"[System: Empty message content sanitised to satisfy protocol]"}
"""What clients send for an answer without text: Claude Code (two), Qwen Code, LiteLLM."""
_END_OF_THINKING = "</think>"
HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")
_UNREADABLE = re.compile(f"{HALF_A_CHARACTER.pattern}|NaN|Infinity")


def read_messages(messages: Any) -> list[Message]:
    """OpenAI's chat messages in the form of templates: contents are strings, arguments of calls are objects. Raises
    ``GatewayRequestError`` for anything else."""
    if not isinstance(messages, list) or not messages:
        message = "messages must be a list of at least one object with a role and a content"
        raise GatewayRequestError(message, param="messages")
    return [_read(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _read(message: Any, param: str) -> Message:
    if not isinstance(message, Mapping):
        raise GatewayRequestError(f"{param} must be an object, got {type(message).__name__}", param=param)
    client_role = message.get("role")
    role = _ROLES.get(client_role, client_role) if isinstance(client_role, str) else None
    if role not in _TEMPLATE_ROLES:
        roles = "system, developer, user, assistant or tool"
        raise GatewayRequestError(f"{param}.role must be {roles}, got {client_role!r}", param=f"{param}.role")
    join = "" if role == "assistant" else " "
    text = system_text if role == "system" else text_of
    read: Message = {"role": role, "content": text(message.get("content"), f"{param}.content", join=join)}
    if message.get("function_call"):
        raise GatewayRequestError(f"{param}.function_call is OpenAI's old form: send tool_calls", param=param)
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise GatewayRequestError(f"{param}.tool_calls must be a list", param=f"{param}.tool_calls")
        read["tool_calls"] = [_read_call(call, f"{param}.tool_calls[{n}]") for n, call in enumerate(calls)]
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if role == "assistant" and isinstance(reasoning, str) and reasoning:
        read["reasoning_content"] = reasoning
    for name in ("tool_call_id", "name"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    return read


def _read_call(call: Any, param: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise GatewayRequestError(f"{param} must be a function call with a name", param=param)
    arguments = function.get("arguments")
    try:
        if isinstance(arguments, str):  # some clients send an empty string for no arguments
            arguments = encodable(json.loads(arguments)) if arguments.strip() else None
    except ValueError:
        pass  # malformed arguments stay the model's text
    read = {"name": function["name"], "arguments": {} if arguments is None else arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": read}


def check_results(messages: Sequence[Message], message: str, *, in_text: bool, start: int = 0) -> None:
    """Refuse a tool's result, from index ``start`` on, whose call is not before it, with the protocol's ``message``. A
    result without an id may belong to any call, and a call without an id may have any result. ``in_text``: agents may
    write calls as text and make up the ids of results."""
    for index in range(start, len(messages)):
        call_id = messages[index].get("tool_call_id")
        if call_id and messages[index]["role"] == "tool" and not _is_called(messages, index, call_id, in_text=in_text):
            raise GatewayRequestError(message.format(call_id), code="invalid_value", param="tool_call_id")


def _is_called(messages: Sequence[Message], index: int, call_id: str, *, in_text: bool) -> bool:
    for earlier in reversed(range(index)):
        calls = messages[earlier].get("tool_calls") or ()
        if any(call["id"] in ("", call_id) for call in calls):
            return True
        if in_text and messages[earlier]["role"] != "tool":
            return not calls
    return False


def encodable(value: Any) -> Any:
    """JSON that tokenizers and clients can read: an escaped lone surrogate becomes U+FFFD, NaN null."""
    text = json.dumps(value, ensure_ascii=False)
    if not _UNREADABLE.search(text):
        return value
    return json.loads(HALF_A_CHARACTER.sub("\ufffd", text), parse_constant=lambda _: None)


def text_of(content: Any, param: str, *, join: str = " ") -> str:
    """A content, a string or a list of text parts, as one string; parts are joined as in SGLang."""
    if content is None or isinstance(content, str):
        return content or ""
    content_parts = content if isinstance(content, list) else [content]
    texts = []
    for part in content_parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        key = "refusal" if kind == "refusal" else "text"
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and str(kind) in _TEXT_PARTS and isinstance(part.get(key), str):
            texts.append(part[key])
        elif isinstance(part, Mapping) and str(kind) in FILE_KINDS:
            texts.append(file_text(part, param))
        else:
            unread = f"a part of type {kind!r}" if kind else type(part).__name__
            message = f"{param} has {unread}; texts are read, files of text, and images of users and tools"
            raise GatewayRequestError(message, param=param)
    return joined(texts, join)


def system_text(content: Any, param: str, *, join: str = " ") -> str:
    """``text_of`` a system prompt, without text that is the transport's."""
    return _TRANSPORT.sub("", text_of(content, param, join=join))


# -- keys -------------------------------------------------------------------------------------------------------------


def message_key(message: Mapping[str, Any]) -> Hashable:
    """A key that is equal for equivalent messages at the same place of a conversation."""
    if message["role"] == "text":  # prompts of completions are compared exactly
        return "text", message["content"]
    role, content = message["role"], message["content"].rstrip()
    if role == "assistant":
        calls = message.get("tool_calls") or ()
        return role, content, message.get("reasoning_content"), *(call["id"] for call in calls), _calls_key(calls)
    return role, content, message.get("tool_call_id")


def answer_keys(message: Mapping[str, Any]) -> list[Hashable]:
    """Keys of an answer, the most specific first: ids of its calls, text with reasoning, text."""
    calls = message.get("tool_calls") or ()
    keys: list[Hashable] = []
    words = _text(message["content"])
    text = ("" if words in _PLACEHOLDERS else words, _calls_key(calls))
    if calls and all(call["id"] for call in calls):
        keys.append(("ids", tuple(call["id"] for call in calls), text[1]))
    if reasoning := _reasoning(message):
        keys.append(("reasoning", reasoning, *text))
    keys.append(("text", *text))
    return keys


def same_words(sent: Mapping[str, Any], served: Mapping[str, Any]) -> bool:
    """Whether an answer, recognized by its calls or its text, came back unchanged. Thinking may be left out, and may
    stand as the text of an answer without one, as Copilot CLI sends it."""
    text, reasoning = _text(served["content"]), _reasoning(served)
    same = _text(sent["content"]) in ((text,) if text else (reasoning, *_PLACEHOLDERS))
    return same and _reasoning(sent).split() in ([], reasoning.split())


def _text(content: str) -> str:
    return content.rpartition(_END_OF_THINKING)[2].strip()


def _reasoning(message: Mapping[str, Any]) -> str:
    thinking = message["content"].rpartition(_END_OF_THINKING)[0].strip()
    return (message.get("reasoning_content") or thinking.removeprefix("<think>")).strip()


def _calls_key(calls: Sequence[Mapping[str, Any]]) -> Hashable:
    return tuple((call["function"]["name"], canonical(call["function"]["arguments"])) for call in calls)


def canonical(value: Any) -> str:
    """JSON in one form for any order of keys and any serializer; ``1.0`` is ``1``, and integers are as a client in
    JavaScript sends them back, as doubles."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return value.strip()
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)


def _plain(value: Any) -> Any:
    if type(value) in (int, float) and abs(value) < 1e308:
        return int(float(value)) if float(value).is_integer() else value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
