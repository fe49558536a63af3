"""Through a real sglang-router with two workers."""

import importlib.util
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from agl_slime import SamplingParams, SGLangClient
from agl_slime.engine.process import EmbeddedEngine
from tests.harness.routers import sglang_router

pytestmark = [
    pytest.mark.slime,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang_router") is None, reason="needs the router: pip install sglang-router==0.3.2"
    ),
]


@pytest.fixture
def engines(policy_dir: Path) -> Iterator[list[EmbeddedEngine]]:
    with EmbeddedEngine(policy_dir) as first, EmbeddedEngine(policy_dir) as second:
        yield [first, second]


def sampled(engine: EmbeddedEngine) -> int:
    with urllib.request.urlopen(f"{engine.url}/server_info", timeout=10) as answer:
        return json.load(answer)["tokens_sampled"]


async def test_the_requests_of_one_rollout_stay_on_one_worker(engines: list[EmbeddedEngine]):
    sampling = SamplingParams(max_new_tokens=4)
    chosen: list[int] = []
    with sglang_router([engine.url for engine in engines]) as url:
        async with SGLangClient(base_url=url) as client:
            for key in range(12):
                counts = [sampled(engine) for engine in engines]
                for _ in range(4):
                    await client.generate([5, 6, 7], sampling, routing_key=f"rollout-{key}")
                grown = [sampled(engine) > count for engine, count in zip(engines, counts, strict=True)]
                assert sum(grown) == 1, f"the four requests of rollout {key} went to {sum(grown)} workers"
                chosen.append(grown.index(True))
    assert set(chosen) == {0, 1}
