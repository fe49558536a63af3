"""Rollouts written into a store as a runner would write them, for tests that decide when and how each ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agl_slime.engine.client.generation import WeightSpan
from agl_slime.support.agl import (
    AttemptedRollout,
    EnqueueRolloutRequest,
    LightningStore,
    Rollout,
    RolloutConfig,
    Span,
    emit_reward,
)
from agl_slime.tokens import attributes as names
from agl_slime.tokens.span_codec import TurnEncoder
from agl_slime.tokens.turn import Turn

RESPONSE = (4, 5)


def a_turn(number: int = 0, *, version: str = "0") -> Turn:
    """Three prompt tokens, two sampled ones; ``number`` makes it tell-tale."""
    return Turn(
        prompt_ids=[1, 2, 100 + number],
        response_ids=list(RESPONSE),
        log_probs=[-0.5, -0.25],
        weight_versions=[WeightSpan(version, 0, 2)],
        text="hello",
        messages=[{"role": "user", "content": "hi"}],
    )


async def enqueue_group(
    store: LightningStore, group_id: str, *, size: int, instance_id: str | None = None
) -> list[Rollout]:
    """The rollouts of a group as the loop enqueues them."""
    metadata = {"group_id": group_id, "group_size": size} | (
        {} if instance_id is None else {"instance_id": instance_id}
    )
    return [
        *await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input={"n": i}, mode="train", metadata=metadata) for i in range(size)]
        )
    ]


async def enqueue(
    store: LightningStore,
    n: int = 1,
    *,
    group_id: str | None = None,
    size: int | None = None,
    mode: Any = "train",
    max_attempts: int = 1,
) -> list[str]:
    """Ids of ``n`` rollouts of one group; ``size`` goes into their metadata as the loop puts it there."""
    metadata: dict[str, Any] = {}
    if group_id is not None:
        metadata["group_id"] = group_id
    if size is not None:
        metadata["group_size"] = size
    config = RolloutConfig(max_attempts=max_attempts, retry_condition=["failed"] if max_attempts > 1 else [])
    requests = [EnqueueRolloutRequest(input={"n": i}, mode=mode, metadata=metadata, config=config) for i in range(n)]
    return [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]


async def enqueue_inputs(store: LightningStore, inputs: Sequence[Any], **config: Any) -> list[str]:
    """Ids of rollouts without a group, one per input."""
    requests = [EnqueueRolloutRequest(input=item, mode="train", config=RolloutConfig(**config)) for item in inputs]
    return [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]


async def claim(store: LightningStore, worker_id: str = "w") -> AttemptedRollout:
    [claimed] = await store.dequeue_many_rollouts(limit=1, worker_id=worker_id)
    return claimed


def make_span(rollout_id: str, attempt_id: str, sequence_id: int, **attributes: Any) -> Span:
    return Span.from_attributes(
        rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=sequence_id, attributes=attributes
    )


async def execute(store: LightningStore, count: int, *, span_chars: int = 100) -> list[str]:
    """Enqueue and finish rollouts with one span each; their ids."""
    ids = await enqueue(store, count)
    for _ in ids:
        claimed = await claim(store)
        attempt_id = claimed.attempt.attempt_id
        await store.add_many_spans([make_span(claimed.rollout_id, attempt_id, 1, text="x" * span_chars)])
        await store.update_attempt(claimed.rollout_id, attempt_id, status="succeeded")
    return ids


async def finish(
    store: LightningStore,
    rollout_id: str,
    *,
    reward: Any = 1.0,
    turns: Sequence[Turn] | None = None,
    status: Any = "succeeded",
    number: int = 0,
) -> str:
    """One attempt of a rollout from its start to its end; returns the attempt's id."""
    attempted = await store.start_attempt(rollout_id)
    attempt_id = attempted.attempt.attempt_id
    written: list[tuple[str, dict[str, Any]]] = []
    encoder = TurnEncoder()
    for turn in turns if turns is not None else [a_turn(number)]:
        written.append((names.GENERATE_SPAN, encoder.encode(turn)))
    if reward is not None:
        core = emit_reward(reward, propagate=False)
        written.append((core.name, dict(core.attributes)))
    spans = [
        Span.from_attributes(
            name=name,
            attributes=attributes,
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            sequence_id=i + 1,
            start_time=i,
            end_time=i,
        )
        for i, (name, attributes) in enumerate(written)
    ]
    if spans:
        await store.add_many_spans(spans)
    await store.update_attempt(rollout_id, attempt_id, status=status)
    return attempt_id
