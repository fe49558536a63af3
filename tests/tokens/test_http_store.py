"""Turns through Agent Lightning's HTTP store: what a remote runner writes and a data source in another process
reads."""

from __future__ import annotations

import time

from agl_slime.support.agl import (
    EnqueueRolloutRequest,
    InMemoryLightningStore,
    LightningStoreClient,
    LightningStoreServer,
    Span,
    emit_reward,
)
from agl_slime.tokens import attributes as names
from agl_slime.tokens.converter import convert_rollout
from agl_slime.tokens.span_codec import TurnEncoder
from agl_slime.tokens.turn import Turn
from tests.harness.servers import free_port


async def test_a_rollout_comes_back_exactly_over_http():
    turns = (
        Turn(
            prompt_ids=[1, 2],
            response_ids=[3, 150_000],
            log_probs=[-0.1, -1e-7],
            text="\ud800 é",
            messages=[{"role": "user", "content": "\ud800é"}],
        ),
        Turn(prompt_ids=[1, 2, 3, 150_000, 4], response_ids=[5], log_probs=[-17.25], base_turn=0, kept_tokens=4),
    )
    encoder = TurnEncoder(model="m")
    reward = emit_reward({"correct": 1.0, "format": 0.5}, primary_key="correct", propagate=False)
    server = LightningStoreServer(InMemoryLightningStore(thread_safe=True), "127.0.0.1", free_port())
    await server.start()
    client = LightningStoreClient(server.endpoint)
    try:
        await client.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input={"label": "é"}, mode="train", metadata={"group_id": "g"})]
        )
        [claimed] = await client.dequeue_many_rollouts(limit=1)
        written = [(names.GENERATE_SPAN, encoder.encode(turn)) for turn in turns] + [
            (reward.name, dict(reward.attributes))
        ]
        await client.add_many_spans(
            [
                Span.from_attributes(
                    name=name,
                    attributes=attributes,
                    rollout_id=claimed.rollout_id,
                    attempt_id=claimed.attempt.attempt_id,
                    sequence_id=i + 1,
                    start_time=time.time(),
                )
                for i, (name, attributes) in enumerate(written)
            ]
        )
        await client.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
        rollout = await client.get_rollout_by_id(claimed.rollout_id)
        spans = await client.query_spans(claimed.rollout_id, "latest")
    finally:
        await client.close()
        await server.stop()

    assert rollout is not None
    conversion = convert_rollout(rollout, spans, reward_key="format")
    assert conversion.trajectory.turns == turns
    [sample] = conversion.samples
    assert sample.tokens == [1, 2, 3, 150_000, 4, 5]
    assert sample.loss_mask == [1, 1, 0, 1]
    assert (sample.label, sample.reward, sample.metadata["group_id"]) == ("é", {"correct": 1.0, "format": 0.5}, "g")
