"""Store calls: the CPU time of the calls that one rollout makes, beside Agent Lightning's in-memory store.

    python -m benchmarks.store_calls [--quick]

A turn of 64 tokens and a reward per rollout; claims in batches of 100 are divided. Medians, one thread. Takes 10 s.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable
from typing import Any

from benchmarks.common import llm_resources, print_table, quiet, requests
from benchmarks.work import make_turn

_BATCH = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rollouts")
    options = parser.parse_args()
    quiet()
    stock, ours = (asyncio.run(measure(own, 500 if options.quick else 3_000)) for own in (False, True))
    stock["release"] = 0.0  # it has none
    rows = [[name, f"{stock[name]:.1f}", f"{ours[name]:.1f}"] for name in ours]
    rows.append(["together", f"{sum(stock.values()):.0f}", f"{sum(ours.values()):.0f}"])
    print_table("Store calls of a rollout: µs of CPU", ["call", "Agent Lightning", "BridgeStore"], rows)
    return 0


async def measure(own: bool, rollouts: int) -> dict[str, float]:
    from agl_slime.store.bridge import BridgeStore, Retention
    from agl_slime.support.agl import InMemoryLightningStore, Span
    from agl_slime.tokens.span_codec import TurnEncoder

    store: Any = (
        BridgeStore(retention=Retention(released_rollouts=0)) if own else InMemoryLightningStore(thread_safe=True)
    )
    await store.add_resources(llm_resources("http://127.0.0.1:1"))
    turn = make_turn(32, 32)
    seconds: dict[str, list[float]] = {}

    async def timed(name: str, call: Awaitable[Any], *, per: int = 1) -> Any:
        began = time.thread_time()
        result = await call
        seconds.setdefault(name, []).append((time.thread_time() - began) / per)
        return result

    for _ in range(rollouts // _BATCH):
        await store.enqueue_many_rollouts(requests(_BATCH))
        for rollout in await timed(
            "dequeue_many_rollouts", store.dequeue_many_rollouts(limit=_BATCH, worker_id="one"), per=_BATCH
        ):
            key = rollout.rollout_id, rollout.attempt.attempt_id
            await timed("get_resources_by_id", store.get_resources_by_id(rollout.resources_id))
            numbers = await timed("get_many_span_sequence_ids", store.get_many_span_sequence_ids([key, key]))
            attributes: list[dict[str, Any]] = [TurnEncoder().encode(turn), {"agentlightning.reward.0.value": 1.0}]
            common: dict[str, Any] = {"rollout_id": key[0], "attempt_id": key[1]}
            spans = [
                Span.from_attributes(**common, sequence_id=n, attributes=a)
                for n, a in zip(numbers, attributes, strict=True)
            ]
            await timed("add_many_spans", store.add_many_spans(spans))
            await timed("update_attempt", store.update_attempt(*key, status="succeeded"))
            await timed("get_rollout_by_id", store.get_rollout_by_id(key[0]))
            await timed("get_latest_attempt", store.get_latest_attempt(key[0]))
            await timed("query_spans", store.query_spans(*key))
            if own:
                await timed("release", store.release([key[0]]))
    return {name: 1e6 * statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    sys.exit(main())
