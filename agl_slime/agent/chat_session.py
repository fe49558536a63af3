"""``ChatSession``: a conversation with a model that takes chat messages and returns text."""

from __future__ import annotations

import copy
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agl_slime.agent.scheduler import StopReason
from agl_slime.agent.session import Answer, Session, SpanWriter
from agl_slime.engine.client.generation import FinishReason, Generation, SamplingParams
from agl_slime.errors import EngineProtocolError
from agl_slime.tokens.answer import AnswerParts, ToolCall
from agl_slime.tokens.codec import token_array
from agl_slime.tokens.formats import read_object
from agl_slime.tokens.span_codec import TurnEncoder
from agl_slime.tokens.turn import Turn

_NO_IDS = token_array((), name="ids")


@dataclass(kw_only=True, eq=False)
class ChatSession(Session):
    """A conversation as messages alone. ``complete(messages, sampling=...)`` returns OpenAI's chat completion as JSON;
    with ``write`` each turn is written as a span without token ids."""

    complete: Callable[..., Awaitable[Mapping[str, Any]]]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    write: SpanWriter | None = None
    tokenizer: Any = None  # schedulers read it

    def __post_init__(self) -> None:
        super().__post_init__()
        self._encoder = TurnEncoder()

    async def ask(self, *messages: Mapping[str, Any], sampling: SamplingParams | None = None, **_: Any) -> Answer:
        """As ``RolloutSession.ask``, whose other arguments concern tokens and are ignored."""
        with self._one_more_turn(messages):
            history, started = copy.deepcopy(self.messages), time.time()
            completion = await self.complete(history, sampling=sampling or self.sampling)
        content, calls, finish = _choice(completion)
        for number, call in enumerate(calls):  # some servers leave the id out, and a tool result refers to it
            call |= {"id": call.get("id") or f"call_{len(self.turns) + 1}_{number}", "type": "function"}
        self.add({"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})})
        self.stats.stop_reason = StopReason(finish)
        answer: Any = {"text": content, "finish_reason": finish, "latency_s": time.time() - started}
        turn = Turn(prompt_ids=_NO_IDS, response_ids=_NO_IDS, messages=history, **answer)
        self.turns.append(turn)
        if self.write is not None:
            self.write(self._encoder.encode(turn), started)
        generation = Generation(output_ids=(), log_probs=(), **answer)
        return Answer(content, finish, generation, _parsed(content, calls) if calls or self.parser is None else None)

    def branch(self, messages: Sequence[Mapping[str, Any]], *, template: Any = None, role: str = "") -> ChatSession:
        """Another conversation of the same rollout; its turns count."""
        branch = copy.copy(self)
        branch.messages = [*map(dict, messages)]
        return branch

    def set_reward(self, reward: Any) -> None:
        """Does nothing: rewards of roles are for training, and these turns are never trained on."""


def _choice(completion: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]], FinishReason]:
    try:
        choice = completion["choices"][0]
        message = choice["message"]
        calls = [{**call, "function": dict(call["function"])} for call in message.get("tool_calls") or ()]
        content = message.get("content") or ""
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineProtocolError(f"the API returned no OpenAI chat completion: {str(completion)[:200]}") from error
    return str(content), calls, "length" if choice.get("finish_reason") == "length" else "stop"


def _parsed(content: str, tool_calls: Sequence[Mapping[str, Any]]) -> AnswerParts:
    calls, malformed = [], []
    for call in tool_calls:
        name, text = str(call["function"].get("name")), call["function"].get("arguments")
        try:
            arguments = read_object(text or "{}")
        except ValueError:
            malformed.append(text)
            arguments = {"arguments": text}  # no tool has this parameter, so the model sees an error
        calls.append(ToolCall(name=name, arguments=arguments, id=call.get("id") or ""))
    return AnswerParts(content=content, calls=tuple(calls), malformed=tuple(malformed))
