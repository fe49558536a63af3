"""How the text of an answer becomes its parts, whole and while it is sampled."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Any

from agl_slime.gateway.calls import Call, Choice, split_thinking, visible
from agl_slime.gateway.messages import encodable
from agl_slime.rollout.session import RolloutSession
from agl_slime.rollout.tool_parsers import ToolCall, ToolParser
from agl_slime.tokens.template import Message


@dataclass(frozen=True, slots=True)
class Reading:
    """How the text of an answer becomes its parts. ``opened`` is ``None`` where it stays as it is; ``special`` are
    tokens that are no text, where no call may be written with them."""

    opened: bool | None
    parser: ToolParser | None
    stops: tuple[str, ...]
    special: re.Pattern[str] | None = None

    def visible(self, text: str) -> tuple[str, str]:
        return visible(self._text(text), opened=self.opened, parser=self.parser, stops=self.stops)

    def _text(self, text: str) -> str:
        return text if self.special is None or self.opened is None or self.parser else self.special.sub("", text)

    def choice(self, generation: Any, call: Call, session: RolloutSession) -> tuple[Choice, dict[str, str]]:
        """The parts, and the ids of calls, as served and as written."""
        reasoning, content, _ = split_thinking(self._text(generation.text), opened=self.opened)
        cut = generation.finish_reason == "abort"
        if cut:  # what its reader saw
            reasoning, content = self.visible(generation.text)
        calls: list[ToolCall] = []
        ids: dict[str, str] = {}
        stats = session.stats
        if self.parser is not None and not cut:
            parsed = self.parser.parse(content)
            content = parsed.content.strip()
            stats.calls["malformed"] += len(parsed.malformed)
            parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in call.tools}
            for written in parsed.calls:
                served = self.parser.typed(written, parameters.get(written.name))
                name, arguments = encodable([served.name, dict(served.arguments)])
                ids[served_id := f"call_{secrets.token_hex(8)}"] = written.id
                calls.append(ToolCall(name=name, arguments=arguments, id=served_id))
                known = written.name in parameters
                stats.tool_calls[written.name] += known
                stats.calls["unknown"] += not known
        finish = "length" if generation.finish_reason != "stop" else "tool_calls" if calls else "stop"
        choice = Choice(reasoning=reasoning, content=content, calls=tuple(calls), finish=finish, generation=generation)
        return choice, ids


def served_message(choice: Choice, last: Message) -> Message:
    """The answer as its client will send it back; with the beginning that the client gave it."""
    begun = last["content"] if last["role"] == "assistant" else ""
    served: Message = {"role": "assistant", "content": begun + choice.content}
    if choice.reasoning:
        served["reasoning_content"] = choice.reasoning
    if choice.calls:
        served["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return served
