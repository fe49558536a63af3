"""``Reading``: turns sampled text into the answer that a client gets, whole or as a stream."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from agl_slime.agent.session import RolloutSession
from agl_slime.gateway.calls import Call, Choice
from agl_slime.gateway.messages import encodable
from agl_slime.tokens.answer import AnswerParts, ToolCall
from agl_slime.tokens.formats import cut_at_marks
from agl_slime.tokens.reader import AnswerReader
from agl_slime.tokens.template import Message


@dataclass(frozen=True, slots=True)
class Reading:
    """The way to read an answer: ``reader`` splits it (``None``: plain text); ``stops`` end it, outside of it."""

    reader: AnswerReader | None
    stops: tuple[str, ...]

    def visible(self, text: str) -> tuple[str, str]:
        """The reasoning and content of an unfinished answer, without text that later tokens could change."""
        if self.reader is None:
            return "", cut_at_marks(text.rstrip("\ufffd"), self.stops)
        answer = self.reader.visible_parts(text, self.stops)
        return answer.reasoning or "", answer.content

    def choice(self, generation: Any, call: Call, session: RolloutSession) -> tuple[Choice, dict[str, str]]:
        """The answer, and the ids of its calls as the model wrote them, by served id."""
        if generation.finish_reason == "abort":  # the part that the client saw
            reasoning, content = self.visible(generation.text)
            answer = AnswerParts(reasoning, content=content)
        elif self.reader is None:
            answer = AnswerParts(content=generation.text)
        else:
            answer = self.reader.read(generation.text, generation.output_ids)
            reasoning, content = self.visible(generation.text) if call.stream else ("", "")
            if not ((answer.reasoning or "").startswith(reasoning) and answer.content.startswith(content)):
                # split by tokens it does not extend the text that was streamed
                answer = self.reader.read(generation.text)
        calls: list[ToolCall] = []
        ids: dict[str, str] = {}
        stats = session.stats
        stats.count_malformed(answer.malformed)
        parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in call.offered}
        for written in answer.calls:
            served = (self.reader or AnswerReader()).convert_types(written, parameters.get(written.name))
            name, arguments = encodable([served.name, dict(served.arguments)])
            ids[served_id := f"call_{secrets.token_hex(8)}"] = written.id
            calls.append(ToolCall(name=name, arguments=arguments, id=served_id))
            offered = written.name in parameters
            stats.tool_calls[written.name] += offered
            stats.calls["unknown"] += not offered
        finish = "length" if generation.finish_reason != "stop" else "tool_calls" if calls else "stop"
        reasoning, content = answer.reasoning or "", answer.content
        choice = Choice(reasoning=reasoning, content=content, calls=tuple(calls), finish=finish, generation=generation)
        return choice, ids


def served_message(choice: Choice, last: Message) -> Message:
    """The answer as its client will send it back, after a prefix that the client gave as the ``last`` message."""
    prefix = last["content"] if last["role"] == "assistant" else ""
    served: Message = {"role": "assistant", "content": prefix + choice.content}
    if choice.reasoning:
        served["reasoning_content"] = choice.reasoning
    if choice.calls:
        served["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    return served
