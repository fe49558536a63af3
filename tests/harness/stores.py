"""Rollouts in a store, written as a runner writes them; the test decides when and how each ends."""

from collections.abc import Iterable, Sequence
from typing import Any

from agl_slime.engine.client.generation import WeightSpan
from agl_slime.support import agl
from agl_slime.tokens import attributes as names
from agl_slime.tokens.span_codec import TurnEncoder
from agl_slime.tokens.turn import Turn

RESPONSE = (4, 5)


def a_turn(number: int = 0, *, version: str = "0") -> Turn:
    """Three prompt tokens and two sampled ones; the last prompt token is ``100 + number``."""
    return Turn(
        prompt_ids=[1, 2, 100 + number],
        response_ids=list(RESPONSE),
        log_probs=[-0.5, -0.25],
        weight_versions=[WeightSpan(version, 0, 2)],
        text="hello",
        messages=[{"role": "user", "content": "hi"}],
    )


async def enqueue_rollouts(
    store: agl.LightningStore, inputs: Iterable[Any], *, mode: Any = "train", metadata: Any = None, **config: Any
) -> list[agl.Rollout]:
    """A rollout per input."""
    fields: dict[str, Any] = {"mode": mode, "metadata": metadata or {}, "config": agl.RolloutConfig(**config)}
    return [*await store.enqueue_many_rollouts([agl.EnqueueRolloutRequest(input=item, **fields) for item in inputs])]


async def enqueue_group(store: agl.LightningStore, group_id: str, *, size: int, **more: str) -> list[agl.Rollout]:
    """The rollouts of a group as the loop enqueues them, with ``more`` metadata."""
    metadata = {"group_id": group_id, "group_size": size, **more}
    return await enqueue_rollouts(store, [{"n": i} for i in range(size)], metadata=metadata)


async def enqueue(
    store: agl.LightningStore,
    n: int = 1,
    *,
    group_id: str | None = None,
    size: int | None = None,
    mode: Any = "train",
    max_attempts: int = 1,
) -> list[str]:
    """Ids of ``n`` rollouts of one group of ``size``."""
    fields = {"group_id": group_id, "group_size": size}
    metadata = {name: value for name, value in fields.items() if value is not None}
    config = {"max_attempts": max_attempts, "retry_condition": ["failed"] if max_attempts > 1 else []}
    inputs = [{"n": i} for i in range(n)]
    rollouts = await enqueue_rollouts(store, inputs, mode=mode, metadata=metadata, **config)
    return [rollout.rollout_id for rollout in rollouts]


async def enqueue_inputs(store: agl.LightningStore, inputs: Iterable[Any], **config: Any) -> list[str]:
    """Ids of rollouts without a group, one per input."""
    return [rollout.rollout_id for rollout in await enqueue_rollouts(store, inputs, **config)]


async def claim(store: agl.LightningStore, worker_id: str = "w") -> agl.AttemptedRollout:
    [claimed] = await store.dequeue_many_rollouts(limit=1, worker_id=worker_id)
    return claimed


def make_span(rollout_id: str, attempt_id: str, sequence_id: int, **attributes: Any) -> agl.Span:
    return agl.Span.from_attributes(
        rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=sequence_id, attributes=attributes
    )


async def execute(store: agl.LightningStore, count: int, *, span_chars: int = 100) -> list[str]:
    """Enqueue and finish rollouts with one span each; their ids."""
    ids = await enqueue(store, count)
    for _ in ids:
        claimed = await claim(store)
        attempt_id = claimed.attempt.attempt_id
        await store.add_many_spans([make_span(claimed.rollout_id, attempt_id, 1, text="x" * span_chars)])
        await store.update_attempt(claimed.rollout_id, attempt_id, status="succeeded")
    return ids


async def finish(
    store: agl.LightningStore,
    rollout_id: str,
    *,
    reward: Any = 1.0,
    turns: Sequence[Turn] | None = None,
    status: Any = "succeeded",
    number: int = 0,
) -> str:
    """Run one attempt of a rollout from start to end; returns the attempt's id."""
    attempt_id = (await store.start_attempt(rollout_id)).attempt.attempt_id
    encoder = TurnEncoder()
    written = [(names.GENERATE_SPAN, encoder.encode(turn)) for turn in ([a_turn(number)] if turns is None else turns)]
    if reward is not None:
        first = next(iter(reward)) if isinstance(reward, dict) else None
        core = agl.emit_reward(reward, primary_key=first, propagate=False)
        written.append((core.name, dict(core.attributes)))
    ids = {"rollout_id": rollout_id, "attempt_id": attempt_id}
    spans = [
        agl.Span.from_attributes(name=name, attributes=attributes, sequence_id=i + 1, start_time=i, end_time=i, **ids)
        for i, (name, attributes) in enumerate(written)
    ]
    if spans:
        await store.add_many_spans(spans)
    await store.update_attempt(rollout_id, attempt_id, status=status)
    return attempt_id
