"""Through a real sglang-router with two workers: affinity, and a worker that dies in mid-run."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_slime import BridgeStore, RunnerThread, SamplingParams, SGLangClient
from agl_slime.cli.demo.agent import LookupAgent
from agl_slime.data.results import Outcome
from agl_slime.data.source import GroupSource
from agl_slime.engine.process import EmbeddedEngine
from agl_slime.support.agl import LLM, EnqueueRolloutRequest, RolloutConfig
from agl_slime.tokens.loading import load_tokenizer
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


def test_a_worker_that_dies_in_the_middle_of_a_run_loses_nothing(engines: list[EmbeddedEngine], policy_dir: Path):
    groups, size = 24, 4
    rng, agent, store = random.Random(0), LookupAgent(), BridgeStore()
    ends: list[object] = []

    def kill_after_a_quarter(end: object) -> None:
        ends.append(end)
        if len(ends) == groups:
            engines[1]._process.kill()  # type: ignore[union-attr]

    flags = ["--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--cb-failure-threshold", "2"]
    with sglang_router([engine.url for engine in engines], flags=flags) as url:
        unsubscribe = store.subscribe_finished(kill_after_a_quarter)
        llm = LLM(endpoint=url, model=str(policy_dir), sampling_parameters={"temperature": 1.0, "max_new_tokens": 48})
        asyncio.run(store.add_resources({"main_llm": llm}))
        retried: Any = ["failed", "timeout", "unresponsive"]
        config = RolloutConfig(timeout_seconds=120, max_attempts=3, retry_condition=retried)
        requests = [
            EnqueueRolloutRequest(
                input=task, mode="train", config=config, metadata={"group_id": str(number), "group_size": size}
            )
            for number, task in enumerate(agent.make_task(rng) for _ in range(groups))
            for _ in range(size)
        ]
        with GroupSource(store=store, tokenizer=load_tokenizer(policy_dir), n_samples_per_prompt=size) as source:
            rollouts = asyncio.run(store.enqueue_many_rollouts(requests))
            source.opened([rollout.rollout_id for rollout in rollouts])
            with RunnerThread(agent=agent, store=store):
                taken = source.get_samples(groups)
            counts = source.ledger.counts()
        unsubscribe()
    assert not engines[1].alive
    assert len(taken) == groups
    assert all(len({sample.metadata["agl_rollout_id"] for sample in group}) == size for group in taken)
    assert counts.closed == {Outcome.TRAINED: groups * size}
