"""Conversations with a model that takes chat messages and gives text, in the loop of turns that all agents run in."""

from __future__ import annotations

import copy
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agl_slime.errors import ContextOverflowError, EngineProtocolError
from agl_slime.rollout.chat_api import ChatApi
from agl_slime.rollout.scheduler import StopReason
from agl_slime.rollout.session import Answer, Session, SpanWriter, write_span
from agl_slime.sglang.generation import FinishReason, Generation, SamplingParams
from agl_slime.tokens.answer import AnswerParts, ToolCall
from agl_slime.tokens.codec import token_array
from agl_slime.tokens.formats import read_object
from agl_slime.trace.span_codec import TurnEncoder
from agl_slime.trace.turn import Turn

Complete = Callable[..., Awaitable[Mapping[str, Any]]]
"""Called with messages, and ``sampling`` by name; gives OpenAI's chat completion as JSON."""

_NO_IDS = token_array((), name="ids")


@dataclass(kw_only=True, eq=False)
class ChatSession(Session):
    """A conversation as messages alone, each answer from ``complete``. With ``write`` each turn is a span without token
    ids."""

    complete: Complete
    sampling: SamplingParams = field(default_factory=SamplingParams)
    write: SpanWriter | None = None
    tokenizer: Any = None  # there is none; what a scheduler finds

    def __post_init__(self) -> None:
        super().__post_init__()
        self._encoder = TurnEncoder()

    async def ask(self, *messages: Mapping[str, Any], sampling: SamplingParams | None = None, **_: Any) -> Answer:
        """Append ``messages``, let the model answer, append the answer. What else ``RolloutSession.ask`` takes is about
        tokens, and no matter here."""
        self.add(*messages)
        if self.max_turns is not None and len(self.turns) + self.stats.asking >= self.max_turns:
            raise self._stopped(StopReason.MAX_TURNS, f"the rollout has had its {self.max_turns} turns")
        asked, started = copy.deepcopy(self.messages), time.time()
        self.stats.asking += 1
        try:
            told = await self.complete(asked, sampling=sampling or self.sampling)
        except ContextOverflowError as error:
            if not self.turns:
                raise
            raise self._stopped(StopReason.CONTEXT_OVERFLOW, str(error)) from error
        finally:
            self.stats.asking -= 1
        content, listed, finish = _choice(told)
        self.add({"role": "assistant", "content": content, **({"tool_calls": listed} if listed else {})})
        self.stats.stop_reason = StopReason(finish)
        latency_s = time.time() - started
        turn = Turn(
            prompt_ids=_NO_IDS,
            response_ids=_NO_IDS,
            text=content,
            messages=asked,
            finish_reason=finish,
            latency_s=latency_s,
        )
        self.turns.append(turn)
        if self.write is not None:
            self.write(self._encoder.encode(turn), started)
        generation = Generation(output_ids=(), log_probs=(), text=content, finish_reason=finish)
        return Answer(content, finish, generation, _parsed(content, listed) if listed or self.parser is None else None)

    def branch(self, messages: Sequence[Mapping[str, Any]], *, template: Any = None, role: str = "") -> ChatSession:
        """Another conversation of the same rollout; its turns count."""
        branch = copy.copy(self)
        branch.messages = [*map(dict, messages)]
        return branch

    def set_reward(self, reward: Any) -> None:
        """Rewards of roles say what is trained; nothing is, here."""


def session_with(api: ChatApi, *, shown: Sequence[Mapping[str, Any]] | None = None, **options: Any) -> ChatSession:
    """The conversation of a rollout with ``api``, to which tools are ``shown``."""
    return ChatSession(complete=partial(api.complete, tools=shown), write=write_span, **options)


def _choice(told: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]], FinishReason]:
    try:
        choice = told["choices"][0]
        message = choice["message"]
        listed = [{**call, "function": dict(call["function"])} for call in message.get("tool_calls") or ()]
        content = message.get("content") or ""
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise EngineProtocolError(f"no chat completion of OpenAI's form was answered: {str(told)[:200]}") from error
    return str(content), listed, "length" if choice.get("finish_reason") == "length" else "stop"


def _parsed(content: str, listed: Sequence[Mapping[str, Any]]) -> AnswerParts:
    calls, malformed = [], []
    for call in listed:
        name, written = str(call["function"].get("name")), call["function"].get("arguments")
        try:
            arguments = read_object(written or "{}")
        except ValueError:
            malformed.append(written)
            arguments = {"arguments": written}  # no such argument: the tool's error tells the model
        calls.append(ToolCall(name=name, arguments=arguments, id=call.get("id") or ""))
    return AnswerParts(content=content, calls=tuple(calls), malformed=tuple(malformed))
