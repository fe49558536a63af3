"""Later system messages for templates that refuse, drop or move them.

Harnesses send reminders as system messages in the middle of a conversation. ``in_place`` keeps the history: a reminder
becomes a user message at its place, or is appended to the tool result before it if the template refuses a user message
there or drops the thinking before one. ``user`` always makes it a user message. ``first`` joins all system messages at
the beginning, as SGLang does; each later one then changes the beginning of the prompt.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agl_slime.tokens.fields import AnswerFields, Message
from agl_slime.tokens.rendering import rendered_or_none

LaterSystems = Literal["in_place", "user", "first"]

SYSTEM_ROLES = frozenset({"system", "developer"})
_SENTINEL = "SENTINELsystemSENTINEL"
_CALL = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
_STEP: list[Message] = [
    {"role": "user", "content": "?"},
    {"role": "assistant", "content": "", "reasoning_content": _SENTINEL, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call00000", "name": "f", "content": "r"},
]


class SystemMessages:
    """The system messages that one template accepts; ``fields`` are the template's."""

    def __init__(self, fields: AnswerFields, later: LaterSystems) -> None:
        self._fields, self._later = fields, later
        self._rendered = functools.partial(rendered_or_none, fields.render, generation_prompt=True)
        self._writes = functools.cache(self._writes_in_place)

    def arrange(self, messages: Sequence[Message]) -> Sequence[Message]:
        """``messages`` with system messages only where the template writes them; developer messages become system
        messages in templates without them."""
        roles = [message.get("role") for message in messages]
        if SYSTEM_ROLES.isdisjoint(roles[1:]) and roles[:1] != ["developer"]:
            return messages
        if "developer" in roles and not self._writes("developer", "user"):
            messages = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
        systems = [message for message in messages if message.get("role") in SYSTEM_ROLES]
        if systems == messages[:1] or self._writes("system", "system", "user", "assistant", "system", "user"):
            return messages
        rest = [message for message in messages if message.get("role") not in SYSTEM_ROLES]
        if self._later == "first":
            return [_joined(systems), *rest]
        others = (n for n, message in enumerate(messages) if message.get("role") not in SYSTEM_ROLES)
        first = next(others, len(messages))
        arranged = [_joined(messages[:first])] if first else []
        for message in messages[first:]:
            reminder, last = message.get("role") in SYSTEM_ROLES, arranged[-1].get("role") if arranged else None
            moved = {"role": "user", "content": message.get("content")} if reminder else message
            at_result = reminder and last == "tool" and self._later == "in_place" and self._users_disturb
            if at_result or (moved["role"] == last == "user" and not self._writes("user", "user")):
                arranged[-1] = _appended(arranged[-1], message)
            else:
                arranged.append(moved)
        return arranged

    @functools.cached_property
    def _users_disturb(self) -> bool:
        """Whether the template refuses a user message after a tool result, or drops the thinking before it."""
        step = [*map(self._fields.with_thinking_field, _STEP)]
        alone, with_user = self._rendered(step), self._rendered([*step, {"role": "user", "content": "?"}])
        if alone is None or with_user is None:
            return alone is not None
        return _SENTINEL in alone and _SENTINEL not in with_user

    def _writes_in_place(self, *roles: str) -> bool:
        """Whether messages of these roles are accepted, and each written at its place."""
        messages = [{"role": role, "content": f"{_SENTINEL}{n}"} for n, role in enumerate(roles)]
        if (text := self._rendered(messages)) is None:
            return False
        places = [text.find(message["content"]) for message in messages]
        return -1 not in places and places == sorted(places)


def text_of(message: Mapping[str, Any]) -> str:
    """The content of a message, a string or a list of parts; of other content its text in Python."""
    content = message.get("content") or ""
    if not isinstance(content, list | tuple):
        return str(content)
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def _joined(systems: Sequence[Message]) -> Message:
    return {"role": systems[0]["role"], "content": "\n\n".join(filter(None, map(text_of, systems)))}


def _appended(message: Message, addition: Message) -> Message:
    """``message`` with the content of ``addition`` appended."""
    first, second = message.get("content") or "", addition.get("content") or ""
    if isinstance(first, str) and isinstance(second, str):
        return {**message, "content": "\n\n".join(filter(None, (first, second)))}
    contents = [[{"type": "text", "text": c}] if isinstance(c, str) else list(c) for c in (first, second)]
    return {**message, "content": contents[0] + contents[1]}
