"""What the client must do with any engine of SGLang's protocol: run on the embedded one, and on a real SGLang under the
marker ``sglang``.

Greedy sampling makes answers comparable: aborted as often as one likes, the joined answer must be the uninterrupted
one, on a model that really computes it again from the partial ids.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from agl_slime.engine.client.client import ClientSettings, SGLangClient
from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.engine.client.weights import DiskWeightSync
from agl_slime.errors import ContextOverflowError, EngineRequestError, WeightSyncError
from tests.harness.engine_servers import Server

# a cache that is filled in another order gives other roundings, in float32 some 1e-6
LOG_PROB_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Served:
    """A running engine, and the checkpoint directory that it serves."""

    url: str
    model_path: Path
    vocab_size: int


@pytest.fixture
def served(server: Server) -> Served:
    return Served(server.url, server.policy, json.loads((server.policy / "config.json").read_text())["vocab_size"])


def greedy(n: int, *, stop: tuple[str, ...] = ()) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=n, stop=stop, extra={"ignore_eos": True})


def expect_same(got: Generation, whole: Generation) -> None:
    assert got.output_ids == whole.output_ids
    assert (got.finish_reason, got.matched_stop, got.text) == (whole.finish_reason, whole.matched_stop, whole.text)
    assert got.prompt_tokens == whole.prompt_tokens
    assert max(abs(a - b) for a, b in zip(got.log_probs, whole.log_probs, strict=True)) < LOG_PROB_TOLERANCE
    ends = [0, *(span.end for span in got.weight_versions)]
    assert [span.start for span in got.weight_versions] == ends[:-1]
    assert ends[-1] == len(got.output_ids)


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


async def test_probe(served: Served) -> None:
    async with SGLangClient(base_url=served.url) as client:
        found = await client.probe()
        assert Path(found.model_path).name == served.model_path.name
        assert found.weight_version == await client.weight_version()
        assert await client.workers() == (served.url,)


async def test_many_at_once(served: Served) -> None:
    sampling = SamplingParams(max_new_tokens=8)
    async with SGLangClient(base_url=served.url, vocab_size=served.vocab_size) as client:
        prompts = [[n % 7, n % 50, n % 300] for n in range(300)]
        results = await asyncio.gather(
            *(client.generate(prompt, sampling, routing_key=str(n)) for n, prompt in enumerate(prompts))
        )
    for got in results:
        assert 1 <= len(got.output_ids) == len(got.log_probs) <= 8
        assert got.finish_reason == ("length" if len(got.output_ids) == 8 and got.matched_stop is None else "stop")
        assert got.prompt_tokens == 3
        assert all(0 <= token < served.vocab_size for token in got.output_ids)
        assert all(log_prob <= 0 for log_prob in got.log_probs)


async def test_generation_aborted_anywhere_resumes_with_equal_tokens(served: Served) -> None:
    async with SGLangClient(
        base_url=served.url, settings=ClientSettings(resume_limit=10_000, backoff_base_s=0.01)
    ) as client:
        prompt = list(range(20, 40))
        text = (await client.generate(prompt, greedy(120))).text
        for stop in [(), (text[60:64],), (text[70:85],)]:
            whole = await client.generate(prompt, greedy(120, stop=stop))
            assert (whole.finish_reason == "stop") == bool(stop)
            aborter = asyncio.create_task(keep_aborting(client))
            try:
                results = await asyncio.gather(*(client.generate(prompt, greedy(120, stop=stop)) for _ in range(4)))
            finally:
                aborter.cancel()
            for got in results:
                expect_same(got, whole)
            assert stop or all(got.resumed for got in results)


async def test_a_weight_sync_in_the_middle(served: Served) -> None:
    sync = DiskWeightSync(base_url=served.url)
    async with SGLangClient(base_url=served.url) as client:
        before = await client.weight_version()
        whole = await client.generate([5, 6, 7], greedy(600))
        tasks = [asyncio.create_task(client.generate([5, 6, 7], greedy(600))) for _ in range(4)]
        await running(client, 4)
        await sync.push(str(served.model_path), f"{before}+1")
        assert await client.weight_version() == f"{before}+1"
        for got in await asyncio.gather(*tasks):
            expect_same(got, whole)  # the same weights again, so the same answer
            assert got.resumed == 1
            assert [span.version for span in got.weight_versions] == [before, f"{before}+1"]


async def test_a_checkpoint_that_is_not_there(served: Served) -> None:
    async with SGLangClient(base_url=served.url) as client:
        before = await client.weight_version()
        with pytest.raises(WeightSyncError, match="did not reach 1 of 1 workers"):
            await DiskWeightSync(base_url=served.url).push(str(served.model_path / "nowhere"), "lost")
        assert await client.weight_version() == before
        assert (await client.generate([5, 6, 7], greedy(4))).finish_reason == "length"  # and it goes on


async def test_lengths(served: Served) -> None:
    length = json.loads((served.model_path / "config.json").read_text())["max_position_embeddings"]
    async with (
        SGLangClient(base_url=served.url, context_length=length) as knowing,
        SGLangClient(base_url=served.url) as unknowing,
    ):
        with pytest.raises(ContextOverflowError):
            await unknowing.generate([1] * (length + 1), greedy(1))
        for client, room in itertools.product((knowing, unknowing), (8, 40)):
            got = await client.generate([1] * (length - room), greedy(100))
            assert got.finish_reason == "length"
            assert room - 4 <= len(got.output_ids) <= room  # SGLang keeps a token or two for itself


async def test_a_rid_in_use_is_refused_and_not_sent_again(served: Served) -> None:
    async with SGLangClient(base_url=served.url) as client:
        first = asyncio.create_task(client.generate([1, 2], greedy(2000), rid="twice", resume_aborted=False))
        await running(client, 1)
        with pytest.raises(EngineRequestError, match="Duplicate"):
            await client.generate([1, 2], greedy(2), rid="twice")
        await client.abort("twice")
        assert (await first).finish_reason == "abort"


async def test_a_cancelled_call_frees_its_place(served: Served) -> None:
    async with SGLangClient(base_url=served.url) as client:
        task = asyncio.create_task(client.generate([1, 2], greedy(3500)))
        await running(client, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await running(client, 0)
