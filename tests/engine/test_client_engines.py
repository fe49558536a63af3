"""Rules of the client for any engine of SGLang's protocol: run on the embedded one, and on a real SGLang under the
marker ``sglang``.

Greedy sampling makes answers comparable: the joined answer of an aborted generation must be the uninterrupted one, on a
model that really resumes from the partial ids.
"""

import asyncio
import itertools
import json

import pytest

from agl_slime.engine.client.client import ClientSettings, SGLangClient
from agl_slime.engine.client.generation import Generation, SamplingParams
from agl_slime.errors import ContextOverflowError
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


async def test_generation_aborted_anywhere_resumes_with_equal_tokens(server: Server) -> None:
    """All generations are aborted after each 20 tokens that they have sampled together."""
    progress = asyncio.Semaphore(0)

    async def keep_aborting() -> None:
        while True:
            for _ in range(20):
                await progress.acquire()
            await client.abort()

    settings = ClientSettings(resume_limit=10_000, backoff_base_s=0.01)
    async with SGLangClient(base_url=server.url, settings=settings) as client:
        assert await client.workers() == (server.url,)
        prompt = list(range(20, 40))
        text = (await client.generate(prompt, greedy(60))).text
        for stop in [(), (text[35:50],)]:
            sampling = greedy(60, stop=stop)
            whole = await client.generate(prompt, sampling)
            assert (whole.finish_reason == "stop") == bool(stop)
            aborter = asyncio.create_task(keep_aborting())
            calls = (client.generate(prompt, sampling, on_progress=lambda _: progress.release()) for _ in range(4))
            results = await asyncio.gather(*calls)
            aborter.cancel()
            for joined in results:
                expect_same(joined, whole)
            assert stop or all(joined.resumed for joined in results)


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
