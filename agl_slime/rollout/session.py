"""One rollout's line to the engine: a conversation, its turns, and a span for each.

An agent asks (``ask``), shows what the world answered (``add``) and asks again; prompt ids, sampled ids and log-probs are recorded as the engine gave
them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agl_slime._agl import TraceStatus, get_active_tracer
from agl_slime.errors import RolloutError
from agl_slime.rollout.context import ChatContext, Message
from agl_slime.sglang.payloads import FinishReason, Generation, SamplingParams
from agl_slime.threads import run_in_thread
from agl_slime.tokenizer import ChatTokenizer
from agl_slime.trace.attributes import GENERATE_SPAN
from agl_slime.trace.turn import Turn, TurnEncoder

# Rendering and tokenizing a conversation takes about a millisecond per this many characters; beyond it the work leaves the event loop.
_LONG_CONVERSATION_CHARS = 20_000


class GenerateClient(Protocol):
    """What a session asks of an engine; ``SGLangClient`` is the usual one."""

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams, *, routing_key: str | None = None) -> Generation: ...


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model said in one turn. ``text`` has no stop token."""

    text: str
    finish_reason: FinishReason
    generation: Generation

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


class RolloutSession:
    """The conversation of one rollout with one engine. Not for concurrent ``ask`` calls: a rollout that branches opens one session per branch with
    ``branch``."""

    def __init__(
        self,
        *,
        client: GenerateClient,
        tokenizer: ChatTokenizer,
        sampling: SamplingParams,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        rollout_id: str = "",
        model: str = "",
        encoder: TurnEncoder | None = None,
        turns: list[Turn] | None = None,
    ) -> None:
        self.context = ChatContext(tokenizer=tokenizer, messages=messages, tools=tools)
        self.sampling = sampling
        self.rollout_id = rollout_id
        self.turns: list[Turn] = turns if turns is not None else []
        self._client = client
        self._tokenizer = tokenizer
        self._tools = tools
        self._model = model
        self._encoder = encoder or TurnEncoder(model=model or None)

    @property
    def messages(self) -> list[Message]:
        """The conversation so far."""
        return self.context.messages

    def add(self, *messages: Mapping[str, Any]) -> None:
        """Append what the user, a tool or the environment said."""
        self.context.add(*messages)

    async def ask(self, *messages: Mapping[str, Any], sampling: SamplingParams | None = None) -> Answer:
        """Append ``messages``, let the model answer, append the answer. Raises the client's typed errors."""
        self.add(*messages)
        long = sum(len(str(message.get("content") or "")) for message in self.messages) > _LONG_CONVERSATION_CHARS
        prompt_ids = await run_in_thread(self.context.prompt_ids) if long else self.context.prompt_ids()
        started = time.time()
        # one key per rollout: behind a router its turns stay on the worker that has their prefix cached
        generation = await self._client.generate(prompt_ids, sampling or self.sampling, routing_key=self.rollout_id or None)
        self._record(prompt_ids, generation, started)
        self.context.add_answer(prompt_ids, generation)
        return Answer(generation.text, generation.finish_reason, generation)

    def branch(self, messages: Sequence[Mapping[str, Any]]) -> RolloutSession:
        """Another conversation of the same rollout: its turns count and are trained as well."""
        return RolloutSession(
            client=self._client,
            tokenizer=self._tokenizer,
            sampling=self.sampling,
            messages=messages,
            tools=self._tools,
            rollout_id=self.rollout_id,
            model=self._model,
            encoder=self._encoder,
            turns=self.turns,
        )

    def _record(self, prompt_ids: Sequence[int], generation: Generation, started: float) -> None:
        turn = Turn.from_generation(prompt_ids, generation, messages=list(self.messages))
        self.turns.append(turn)
        tracer = get_active_tracer()
        if tracer is None:
            raise RolloutError("no tracer is active: SGLangLitAgent runs inside an Agent Lightning runner", reason="no_tracer")
        tracer.create_span(GENERATE_SPAN, attributes=self._encoder.encode(turn), timestamp=started, status=TraceStatus(status_code="OK"))
