"""Tool calls in the form that a chat template accepts: arguments as objects or as JSON in strings, and its ids."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agl_slime.errors import PromptError

Message = dict[str, Any]
Render = Callable[[Sequence[Message], bool], str]

_QUESTION: Message = {"role": "user", "content": "?"}
_OBJECTS = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


class CallFormat:
    """The form that one template accepts; ``render`` is the template's."""

    def __init__(self, render: Render) -> None:
        self._render = render

    def convert(self, messages: Sequence[Message]) -> Sequence[Message]:
        if not any(message.get("tool_calls") for message in messages):
            return messages
        if self._wants_text:
            messages = [_with_arguments_as_text(message) for message in messages]
        if self._wants_short_ids:
            messages = [_with_short_ids(message) for message in messages]
        return messages

    @functools.cached_property
    def _wants_text(self) -> bool:
        """Whether the template refuses arguments as objects and accepts JSON in a string (DeepSeek-V3)."""
        called: list[Message] = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [_OBJECTS]}]
        return not self._accepts(called) and self._accepts([_with_arguments_as_text(message) for message in called])

    @functools.cached_property
    def _wants_short_ids(self) -> bool:
        """Whether the template accepts ids of nine letters and digits only (Mistral)."""
        call = {**_OBJECTS, "id": "call_0"}
        called: list[Message] = [_QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
        called.append({"role": "tool", "tool_call_id": "call_0", "name": "f", "content": "r"})
        if self._wants_text:
            called = [_with_arguments_as_text(message) for message in called]
        return not self._accepts(called) and self._accepts([_with_short_ids(message) for message in called])

    def _accepts(self, messages: Sequence[Message]) -> bool:
        try:
            self._render(messages, True)
        except PromptError:
            return False
        return True


def _with_arguments_as_text(message: Message) -> Message:
    """``message`` with the arguments of its calls as JSON in strings."""

    def convert(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            return dict(call)
        function = {**function, "arguments": json.dumps(arguments or {}, ensure_ascii=False)}
        return {**call, "function": function} if "function" in call else function

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [convert(call) for call in calls]} if calls else message


def _with_short_ids(message: Message) -> Message:
    """``message`` with each id as nine letters and digits, equal for equal ids."""
    if calls := message.get("tool_calls"):
        return {**message, "tool_calls": [{**call, "id": _short(str(call.get("id") or ""))} for call in calls]}
    if message.get("role") == "tool" and isinstance(message.get("tool_call_id"), str):
        return {**message, "tool_call_id": _short(message["tool_call_id"])}
    return message


def _short(identity: str) -> str:
    fits = len(identity) == 9 and identity.isascii() and identity.isalnum()
    return identity if fits else hashlib.blake2b(identity.encode("utf-8", "surrogatepass")).hexdigest()[:9]
