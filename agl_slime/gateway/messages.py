"""Chat messages as clients send them, in the one form that templates get, and what makes two of them the same.

Clients change a history in small ways: contents as a string or as parts, white space at the end, arguments of calls
serialized anew, reasoning left out. What they mean is the same, so messages are compared by keys that leave these out.
An answer is known by the ids of its tool calls first, which are ours and survive nearly everything; then by its words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from agl_slime.errors import GatewayRequestError
from agl_slime.gateway.images import joined

Message = dict[str, Any]

_ROLES = {"developer": "system", "function": "tool"}
_KNOWN_ROLES = frozenset({"system", "user", "assistant", "tool"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
_END_OF_THINKING = "</think>"
HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")
_UNREADABLE = re.compile(f"{HALF_A_CHARACTER.pattern}|NaN|Infinity")


def read_messages(messages: Any) -> list[Message]:
    """OpenAI's chat messages as templates get them: contents are strings, arguments of calls are objects. Raises
    ``GatewayRequestError`` for what is no such list, or holds more than text."""
    if not isinstance(messages, list) or not messages:
        raise GatewayRequestError(
            "messages must be a list of at least one object with a role and a content", param="messages"
        )
    return [_read(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _read(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise GatewayRequestError(f"{where} must be an object, got {type(message).__name__}", param=where)
    said = message.get("role")
    role = _ROLES.get(said, said) if isinstance(said, str) else None
    if role not in _KNOWN_ROLES:
        known = "system, developer, user, assistant or tool"
        raise GatewayRequestError(f"{where}.role must be {known}, got {said!r}", param=f"{where}.role")
    join = "" if role == "assistant" else " "  # an answer in parts is one answer
    read: Message = {"role": role, "content": text_of(message.get("content"), f"{where}.content", join=join)}
    if message.get("function_call"):
        raise GatewayRequestError(f"{where}.function_call is OpenAI's old form: send tool_calls", param=where)
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise GatewayRequestError(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
        read["tool_calls"] = [_read_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
    thought = message.get("reasoning_content") or message.get("reasoning")
    if role == "assistant" and isinstance(thought, str) and thought:
        read["reasoning_content"] = thought
    for name in ("tool_call_id", "name"):
        if isinstance(message.get(name), str):
            read[name] = message[name]
    return read


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise GatewayRequestError(f"{where} must be a function call with a name", param=where)
    arguments = function.get("arguments")
    try:
        if isinstance(arguments, str):  # of a call without arguments some clients send an empty one
            arguments = encodable(json.loads(arguments)) if arguments.strip() else None
    except ValueError:
        pass  # as the model wrote it
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": function["name"], "arguments": {} if arguments is None else arguments},
    }


def check_results(messages: Sequence[Message], words: str, *, in_text: bool, known: int = 0) -> None:
    """Refuse a tool's result that names a call which does not stand before it, in the protocol's ``words``; the first
    ``known`` messages were checked before. A result without an id names none, and a call without one may be any.
    ``in_text``: calls may be texts of the agent's own, after which a result has an id that nobody gave."""
    for at in range(known, len(messages)):
        made = messages[at].get("tool_call_id")
        if made and messages[at]["role"] == "tool" and not _is_called(messages, at, made, in_text=in_text):
            raise GatewayRequestError(words.format(made), code="invalid_value", param="tool_call_id")


def _is_called(messages: Sequence[Message], at: int, made: str, *, in_text: bool) -> bool:
    for before in reversed(range(at)):
        calls = messages[before].get("tool_calls") or ()
        if any(call["id"] in ("", made) for call in calls):
            return True
        if in_text and messages[before]["role"] != "tool":
            return not calls
    return False


def encodable(value: Any) -> Any:
    """JSON as tokenizers and clients can read it: an escaped half of a character becomes U+FFFD, NaN null."""
    text = json.dumps(value, ensure_ascii=False)
    if not _UNREADABLE.search(text):
        return value
    return json.loads(HALF_A_CHARACTER.sub("\ufffd", text), parse_constant=lambda _: None)


def text_of(content: Any, where: str, *, join: str = " ") -> str:
    """A content, a string or a list of text parts, as one string; parts are joined as SGLang does."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping) and str(kind) in _TEXT_PARTS and isinstance(part.get(key := _key_of(kind)), str):
            texts.append(part[key])
        else:
            told = f"a part of type {kind!r}" if kind else type(part).__name__
            raise GatewayRequestError(
                f"{where} holds {told}; texts are read, and images of users and tools", param=where
            )
    return joined(texts, join)


def _key_of(kind: str | None) -> str:
    return "refusal" if kind == "refusal" else "text"


# -- when two messages are the same -----------------------------------------------------------------------------------


def message_key(message: Mapping[str, Any]) -> Hashable:
    """Equal for messages that mean the same at the same place of a conversation."""
    if message["role"] == "text":  # no message: what a completion goes on from is exact
        return "text", message["content"]
    role, content = message["role"], message["content"].rstrip()
    if role == "assistant":
        return role, _said(content), _calls_key(message.get("tool_calls") or ())
    return role, content, message.get("tool_call_id")


def answer_keys(message: Mapping[str, Any]) -> list[Hashable]:
    """What an answer may be known by, the surest first: the ids of its calls, its words and reasoning, its words."""
    calls = message.get("tool_calls") or ()
    keys: list[Hashable] = []
    words = (_said(message["content"]), _calls_key(calls))
    if calls and all(call["id"] for call in calls):
        keys.append(("ids", tuple(call["id"] for call in calls), words[1]))
    thought = message.get("reasoning_content") or _thought(message["content"])
    if thought:
        keys.append(("thought", thought.strip(), *words))
    keys.append(("said", *words))
    return keys


def same_words(sent: Mapping[str, Any], served: Mapping[str, Any]) -> bool:
    """Whether the content of an answer that is known by its calls was dropped or left as it was."""
    said = _said(sent["content"])
    return not said or said == _said(served["content"])


def _said(content: str) -> str:
    return content.rpartition(_END_OF_THINKING)[2].strip()


def _thought(content: str) -> str:
    return content.rpartition(_END_OF_THINKING)[0].strip().removeprefix("<think>").strip()


def _calls_key(calls: Sequence[Mapping[str, Any]]) -> Hashable:
    return tuple((call["function"]["name"], canonical(call["function"]["arguments"])) for call in calls)


def canonical(value: Any) -> str:
    """JSON in which the order of keys and the spelling of the serializer make no difference; ``1.0`` is ``1``."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return value.strip()
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
