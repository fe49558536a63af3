"""The agents that the benchmarks execute; in a module of their own, so that other processes can import them."""

from __future__ import annotations

import asyncio
import functools
import random
import time
from typing import Any

from agl_slime import SGLangLitAgent
from agl_slime.support.agl import LitAgent, TraceStatus, emit_reward, get_active_tracer
from agl_slime.tokens.attributes import GENERATE_SPAN
from agl_slime.tokens.span_codec import TurnEncoder
from agl_slime.tokens.turn import Turn


class QuestionAgent(SGLangLitAgent):
    """Asks once; the reward costs nothing."""

    async def score(self, task: dict[str, Any], trajectory: Any) -> float:
        return 1.0


class EmptyAgent(LitAgent[Any]):
    """Does nothing and has a reward: only the bridge costs time."""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> None:
        emit_reward(1.0)


class TurnAgent(LitAgent[Any]):
    """Records one turn as ``SGLangLitAgent`` does, without an engine; waits ``task["wait_s"]`` before."""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> None:
        if wait_s := task.get("wait_s"):
            await asyncio.sleep(wait_s)
        tracer = get_active_tracer()
        assert tracer is not None
        turn = make_turn(task.get("prompt_tokens", 32), task.get("tokens", 32))
        tracer.create_span(
            GENERATE_SPAN,
            attributes=TurnEncoder().encode(turn),
            timestamp=time.time(),
            status=TraceStatus(status_code="OK"),
        )
        emit_reward(1.0)


@functools.lru_cache(maxsize=16)
def make_turn(prompt_tokens: int, tokens: int) -> Turn:
    """A turn of random ids, such as a model with 150,000 tokens samples."""
    rng = random.Random(prompt_tokens * 100_003 + tokens)
    return Turn(
        prompt_ids=[rng.randrange(150_000) for _ in range(prompt_tokens)],
        response_ids=[rng.randrange(150_000) for _ in range(tokens)],
        log_probs=[-rng.random() for _ in range(tokens)],
    )


__all__ = ["EmptyAgent", "QuestionAgent", "TurnAgent", "make_turn"]
