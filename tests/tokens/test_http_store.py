"""Turns through Agent Lightning's HTTP store, from a remote runner to a data source in another process."""

from __future__ import annotations

from agl_slime.support.agl import (
    EnqueueRolloutRequest,
    InMemoryLightningStore,
    LightningStoreClient,
    LightningStoreServer,
)
from agl_slime.tokens.converter import convert_rollout
from agl_slime.tokens.turn import Turn
from tests.harness.servers import free_port
from tests.tokens.spans import attempt_spans


async def test_a_rollout_comes_back_exactly_over_http():
    turns = [
        Turn(
            prompt_ids=[1, 2],
            response_ids=[3, 150_000],
            log_probs=[-0.1, -1e-7],
            text="\ud800 é",
            messages=[{"role": "user", "content": "\ud800é"}],
        ),
        Turn(prompt_ids=[1, 2, 3, 150_000, 4], response_ids=[5], log_probs=[-17.25], base_turn=0, kept_tokens=4),
    ]
    server = LightningStoreServer(InMemoryLightningStore(thread_safe=True), "127.0.0.1", free_port())
    await server.start()
    client = LightningStoreClient(server.endpoint)
    try:
        await client.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input={"label": "é"}, mode="train", metadata={"group_id": "g"})]
        )
        [claimed] = await client.dequeue_many_rollouts(limit=1)
        key = {"rollout_id": claimed.rollout_id, "attempt_id": claimed.attempt.attempt_id}
        reward = {"correct": 1.0, "format": 0.5}
        await client.add_many_spans(attempt_spans(turns, reward, primary_key="correct", **key))
        await client.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
        rollout = await client.get_rollout_by_id(claimed.rollout_id)
        spans = await client.query_spans(claimed.rollout_id, "latest")
    finally:
        await client.close()
        await server.stop()

    assert rollout is not None
    conversion = convert_rollout(rollout, spans, reward_key="format")
    assert conversion.trajectory.turns == tuple(turns)
    [sample] = conversion.samples
    assert sample.tokens == [1, 2, 3, 150_000, 4, 5]
    assert sample.loss_mask == [1, 1, 0, 1]
    assert (sample.label, sample.reward, sample.metadata["group_id"]) == ("é", {"correct": 1.0, "format": 0.5}, "g")
