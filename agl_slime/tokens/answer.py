"""The parts of an answer: reasoning, content and the calls of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call as the model wrote it; formats without types have strings, which ``convert_types`` converts."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""

    def to_message(self) -> dict[str, Any]:
        """The call as an entry of ``tool_calls`` in OpenAI's chat messages."""
        arguments = json.dumps(dict(self.arguments), ensure_ascii=False)
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """The parts of an answer. ``reasoning`` is ``None`` without any; ``reasoning_closed`` is off if the answer ended
    within it. ``content`` is the rest without well-formed calls. ``malformed`` are texts that begin like a call but
    cannot be parsed; they stay in the content."""

    reasoning: str | None = None
    reasoning_closed: bool = True
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: tuple[str, ...] = ()
