"""A gateway in this process whose engine answers with given tokens: its prompts, and a rollout's spans as turns and
segments."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from agl_slime.agent.access import LLM_RESOURCE, EngineAccess
from agl_slime.engine.client.generation import FinishReason, Generation, SamplingParams
from agl_slime.gateway.chat import ChatCompletions
from agl_slime.gateway.server import Gateway
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_blocking
from agl_slime.tokens.segments import Segment, merge_turns
from agl_slime.tokens.span_codec import decode_turns
from agl_slime.tokens.turn import Turn


@dataclass(frozen=True)
class Sampled:
    """An answer to come: its ids, the stop token among them where it ended with one."""

    ids: Sequence[int]
    finish: FinishReason = "stop"


class ScriptedEngine:
    """``generate`` as ``SGLangClient`` has it: the next of ``answers``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.answers: list[Sampled] = []
        self.prompts: list[list[int]] = []

    async def generate(self, input_ids: Sequence[int], sampling: SamplingParams, **how: Any) -> Generation:
        self.prompts.append([*input_ids])
        sampled = self.answers.pop(0)
        ids = tuple(sampled.ids)
        stopped = sampled.finish == "stop"
        text = self._tokenizer.decode([*(ids[:-1] if stopped else ids)], skip_special_tokens=False)
        return Generation(
            output_ids=ids,
            log_probs=(-0.5,) * len(ids),
            text=text,
            finish_reason=sampled.finish,
            matched_stop=ids[-1] if stopped else None,
            prompt_tokens=len(input_ids),
        )

    async def aclose(self) -> None:
        pass


class ScriptedAccess(EngineAccess):
    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer=tokenizer)
        self.engine_client = ScriptedEngine(tokenizer)

    def client(self, llm: LLM, tokenizer: Any) -> Any:
        return self.engine_client


@dataclass
class Rollout:
    """``url`` is the address that an agent gets."""

    url: str
    attempt: Any
    engine: ScriptedEngine
    loop: asyncio.AbstractEventLoop
    spans: list[Any] = field(default_factory=list)

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to chat completions, without HTTP. Raises ``GatewayRequestError``."""
        return self.loop.run_until_complete(self._chat(body))

    async def _chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        protocol = ChatCompletions()
        call, decode = protocol.read(body), await self.attempt.decoder()
        how: Any = {"role": LLM_RESOURCE, "key": secrets.token_bytes(8), "retry": False, "prefix": protocol.prefix}
        with self.attempt.respond(call, **how) as response:
            result = await response.result()
            response.received = True
            return protocol.answer(body, result, decode)

    @property
    def turns(self) -> list[Turn]:
        return decode_turns(self.spans)

    @property
    def segments(self) -> list[Segment]:
        turns = self.turns
        return merge_turns(turns, untrained={number for number, turn in enumerate(turns) if turn.untrained})


class ScriptedGateway:
    """Rollouts one after the other on one gateway."""

    def __init__(self, tokenizer: Any, gateway: Gateway, access: ScriptedAccess) -> None:
        self.tokenizer, self._gateway, self._access = tokenizer, gateway, access
        self._opened, self.loop = 0, asyncio.new_event_loop()

    @contextmanager
    def rollout(self, **sampling: Any) -> Iterator[Rollout]:
        self._opened += 1
        engine = self._access.engine_client
        engine.answers.clear()
        engine.prompts.clear()
        spans: list[Any] = []
        parameters = {"temperature": 1.0, "max_new_tokens": 1_000_000, **sampling}
        llm = LLM(endpoint="http://scripted", model="scripted", sampling_parameters=parameters)
        attempt, served = self._gateway.open(f"ro-{self._opened}", "at-1", {LLM_RESOURCE: llm}, _writer(spans))
        assert attempt is not None
        try:
            yield Rollout(served[LLM_RESOURCE].endpoint, attempt, engine, self.loop, spans)
        finally:
            run_blocking(self._gateway.close(attempt))


@contextmanager
def scripted_gateway(tokenizer: Any, settings: Any = None) -> Iterator[ScriptedGateway]:
    access = ScriptedAccess(tokenizer)
    with Gateway(settings, access=access) as gateway:
        scripted = ScriptedGateway(tokenizer, gateway, access)
        yield scripted
        scripted.loop.close()


def _writer(spans: list[Any]) -> Any:
    return lambda name, attributes, started: spans.append(SimpleNamespace(name=name, attributes=attributes))
