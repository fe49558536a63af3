"""What it costs to learn of newly ended rollouts from a store over HTTP, as the store grows: the feed beside Agent
Lightning's own query.

Run it with ``python benchmarks/store_feed.py``; about half a minute. Prints one table.
"""

from __future__ import annotations

import asyncio
import logging
import time
from statistics import median

from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import RemoteStore
from agl_slime.store.feed import FeedPosition
from agl_slime.store.server import StoreService
from agl_slime.support.agl import LLM, EnqueueRolloutRequest

SIZES = (100, 1_000, 5_000, 10_000)
LOOKS = 5


async def end_some(store: BridgeStore, n: int) -> None:
    rollouts = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={}, mode="train") for _ in range(n)])
    for rollout in rollouts:
        attempted = await store.start_attempt(rollout.rollout_id)
        await store.update_attempt(rollout.rollout_id, attempted.attempt.attempt_id, status="succeeded")


async def measure(store: BridgeStore, url: str) -> None:
    remote, position, ended = RemoteStore(url, request_timeout=120.0), FeedPosition(), 0
    await store.add_resources({"main_llm": LLM(endpoint="http://127.0.0.1:1", model="m")})
    print(f"{'ended so far':>12}  {'query_rollouts, ms':>18}  {'feed, ms':>8}")
    for size in SIZES:
        await end_some(store, size - ended)
        ended = size
        queries, reads = [], []
        for _ in range(LOOKS):
            began = time.perf_counter()
            found = await remote.query_rollouts(status_in=["succeeded", "failed", "cancelled"])
            queries.append(time.perf_counter() - began)
            assert len(found) == ended
        # a follower has read all but the last one
        for _ in range(LOOKS):
            position = FeedPosition(position.server_instance_id or await instance_of(remote), ended - 1)
            began = time.perf_counter()
            async for page in remote.follow_finished(position):
                reads.append(time.perf_counter() - began)
                assert len(page["rollout_ids"]) == 1
                break
        print(f"{ended:>12,}  {median(queries) * 1e3:>18.1f}  {median(reads) * 1e3:>8.1f}")
    await remote.close()


async def instance_of(remote: RemoteStore) -> str:
    async for page in remote.follow_finished(FeedPosition()):
        return page["server_instance_id"]
    raise AssertionError("the feed ended")


def main() -> None:
    logging.getLogger("agentlightning").setLevel(logging.ERROR)
    store = BridgeStore()
    with StoreService(store=store) as service:
        asyncio.run(measure(store, service.url))


if __name__ == "__main__":
    main()
