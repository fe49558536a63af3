"""Rules of the client for any engine of SGLang's protocol: run on the embedded one, and on a real SGLang under the
marker ``sglang``.

Greedy sampling makes answers comparable: the joined answer of an aborted generation must be the uninterrupted one, on a
model that really resumes from the partial ids.
"""

from __future__ import annotations

import asyncio
import itertools
import json

import aiohttp
import pytest

from agl_slime.engine.client.client import ClientSettings, SGLangClient
from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.errors import ContextOverflowError, EngineRequestError, WeightSyncError
from tests.harness.engine_servers import Server

# a cache that is filled in another order gives other roundings, in float32 some 1e-6
LOG_PROB_TOLERANCE = 1e-4


def greedy(n: int, *, stop: tuple[str, ...] = ()) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=n, stop=stop, extra={"ignore_eos": True})


def expect_same(joined: Generation, whole: Generation) -> None:
    for name in ("output_ids", "finish_reason", "matched_stop", "text", "prompt_tokens"):
        assert getattr(joined, name) == getattr(whole, name), name
    assert max(abs(a - b) for a, b in zip(joined.log_probs, whole.log_probs, strict=True)) < LOG_PROB_TOLERANCE
    ends = [0, *(span.end for span in joined.weight_versions)]
    assert [span.start for span in joined.weight_versions] == ends[:-1]
    assert ends[-1] == len(joined.output_ids)


async def keep_aborting(client: SGLangClient) -> None:
    while True:
        await asyncio.sleep(0.01)
        await client.abort()


async def running(client: SGLangClient, n: int) -> None:
    async with aiohttp.ClientSession(client.base_url) as session:
        for _ in range(1000):
            async with session.get("/v1/loads?include=core") as answer:
                if (await answer.json())["loads"][0]["num_running_reqs"] == n:
                    return
            await asyncio.sleep(0.01)
    raise AssertionError(f"the engine did not come to {n} running requests")


async def test_generation_aborted_anywhere_resumes_with_equal_tokens(server: Server) -> None:
    settings = ClientSettings(resume_limit=10_000, backoff_base_s=0.01)
    async with SGLangClient(base_url=server.url, settings=settings) as client:
        prompt = list(range(20, 40))
        text = (await client.generate(prompt, greedy(60))).text
        for stop in [(), (text[35:50],)]:
            whole = await client.generate(prompt, greedy(60, stop=stop))
            assert (whole.finish_reason == "stop") == bool(stop)
            aborter = asyncio.create_task(keep_aborting(client))
            try:
                results = await asyncio.gather(*(client.generate(prompt, greedy(60, stop=stop)) for _ in range(4)))
            finally:
                aborter.cancel()
            for joined in results:
                expect_same(joined, whole)
            assert stop or all(joined.resumed for joined in results)


async def test_a_weight_sync_in_the_middle(server: Server) -> None:
    sync = DiskWeightSync(base_url=server.url)
    async with SGLangClient(base_url=server.url) as client:
        old = await client.weight_version()
        new = f"{old}+1"
        whole = await client.generate([5, 6, 7], greedy(600))
        tasks = [asyncio.create_task(client.generate([5, 6, 7], greedy(600))) for _ in range(4)]
        await running(client, 4)
        assert await client.workers() == (server.url,)
        await sync.push(str(server.policy), new)
        assert await client.weight_version() == new
        for joined in await asyncio.gather(*tasks):
            expect_same(joined, whole)  # the same weights, so the same answer
            assert joined.resumed == 1
            assert [span.version for span in joined.weight_versions] == [old, new]
        with pytest.raises(WeightSyncError, match="did not reach 1 of 1 workers"):
            await sync.push(str(server.policy / "nowhere"), "lost")
        assert await client.weight_version() == new
        assert (await client.generate([5, 6, 7], greedy(4))).finish_reason == "length"


async def test_lengths(server: Server) -> None:
    length = json.loads((server.policy / "config.json").read_text())["max_position_embeddings"]
    async with (
        SGLangClient(base_url=server.url, context_length=length) as knowing,
        SGLangClient(base_url=server.url) as unknowing,
    ):
        with pytest.raises(ContextOverflowError):
            await unknowing.generate([1] * (length + 1), greedy(1))
        for client, room in itertools.product((knowing, unknowing), (8, 40)):
            generation = await client.generate([1] * (length - room), greedy(100))
            assert generation.finish_reason == "length"
            assert room - 4 <= len(generation.output_ids) <= room  # SGLang keeps a token or two for itself


async def test_a_rid_in_use_is_refused_and_a_cancelled_call_frees_its_place(server: Server) -> None:
    async with SGLangClient(base_url=server.url) as client:
        task = asyncio.create_task(client.generate([1, 2], greedy(3500), rid="twice"))
        await running(client, 1)
        with pytest.raises(EngineRequestError, match="Duplicate"):
            await client.generate([1, 2], greedy(2), rid="twice")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await running(client, 0)
