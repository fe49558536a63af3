"""Span cost: writing a turn to the store, reading it and converting it, per 1,000 tokens of it.

    python -m benchmarks.span_cost [--quick]

*packed* is this package's form and store. *lists* is the form that Agent Lightning's adapters read (lists of ids and
log-probs as span attributes) in its own in-memory store; it is converted with our converter, and with Agent Lightning's
``TracerTraceToTriplet``. Each rollout has one turn, half of it prompt, and a reward. Medians of CPU time, one thread.
Takes about 30 s.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from typing import Any

from benchmarks.common import print_table, quiet
from benchmarks.work import make_turn


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    options = parser.parse_args()
    quiet()
    rows = []
    asyncio.run(
        measure(1_000, 100 if options.quick else 400)
    )  # not counted: the memory that a process grows into at its start
    for tokens in (1_000, 2_000, 8_000, 32_000):
        repeats = max(10, (60_000 if options.quick else 400_000) // tokens)
        results = asyncio.run(measure(tokens, repeats))
        ours = sum(results["packed"])
        for name, (write, read, convert) in results.items():
            total = write + read + convert
            per_1k = [f"{1e3 * value * 1_000 / tokens:.3f}" for value in (write, read, convert, total)]
            rows.append([f"{name}, {tokens:,} tokens", *per_1k, f"{total / ours:.1f}x"])
    print_table("Span cost: ms per 1,000 tokens", ["form", "write", "read", "convert", "together", "vs packed"], rows)
    return 0


async def measure(tokens: int, repeats: int) -> dict[str, tuple[float, float, float]]:
    from agentlightning.adapter import TracerTraceToTriplet

    from agl_slime.store.bridge import BridgeStore
    from agl_slime.support.agl import InMemoryLightningStore, Span
    from agl_slime.tokens.attributes import GENERATE_SPAN
    from agl_slime.tokens.converter import convert_rollout
    from agl_slime.tokens.span_codec import TurnEncoder

    turn = make_turn(tokens // 2, tokens - tokens // 2)
    prompt, response = turn.prompt_ids.tolist(), turn.response_ids.tolist()
    assert turn.log_probs is not None
    log_probs = turn.log_probs.tolist()
    reward = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 1.0}

    def packed() -> dict[str, Any]:
        return TurnEncoder().encode(turn)

    def lists() -> dict[str, Any]:
        return {
            "prompt_token_ids": prompt,
            "response_token_ids": response,
            "logprobs.content": log_probs,
            "gen_ai.response.finish_reasons": ["stop"],
        }

    adapter = TracerTraceToTriplet(llm_call_match=GENERATE_SPAN.replace(".", r"\."))

    def ours(rollout: Any, spans: list[Any]) -> None:
        assert convert_rollout(rollout, spans).samples[0].response_length == len(response)

    def triplets(rollout: Any, spans: list[Any]) -> None:
        [triplet] = adapter.adapt(spans)
        assert triplet.response["token_ids"] == response

    cases = {
        "packed": (BridgeStore, packed, ours),
        "lists, our converter": (lambda: InMemoryLightningStore(thread_safe=True), lists, ours),
        "lists, TracerTraceToTriplet": (lambda: InMemoryLightningStore(thread_safe=True), lists, triplets),
    }
    results = {}
    for name, (make_store, encode, convert) in cases.items():
        store: Any = make_store()
        seconds: tuple[list[float], list[float], list[float]] = ([], [], [])
        for _ in range(repeats):
            claimed = await store.start_rollout(input={}, mode="train")
            common: dict[str, Any] = {"rollout_id": claimed.rollout_id, "attempt_id": claimed.attempt.attempt_id}
            began = time.thread_time()
            call = Span.from_attributes(
                **common, sequence_id=1, name=GENERATE_SPAN, attributes=encode(), start_time=1.0, end_time=2.0
            )
            end = Span.from_attributes(
                **common,
                sequence_id=2,
                name="agentlightning.annotation",
                attributes=reward,
                start_time=2.0,
                end_time=2.0,
            )
            await store.add_many_spans([call, end])
            written = time.thread_time()
            await store.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
            rollout = await store.get_rollout_by_id(claimed.rollout_id)
            asked = time.thread_time()
            spans = [*await store.query_spans(claimed.rollout_id, claimed.attempt.attempt_id)]
            read = time.thread_time()
            convert(rollout, spans)
            converted = time.thread_time()
            for values, value in zip(seconds, (written - began, read - asked, converted - read), strict=True):
                values.append(value)
        write_s, read_s, convert_s = map(statistics.median, seconds)
        results[name] = (write_s, read_s, convert_s)
    return results


if __name__ == "__main__":
    sys.exit(main())
