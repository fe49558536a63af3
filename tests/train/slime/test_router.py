"""Through a real sglang-router with two workers: affinity, weight sync, and a worker that dies in mid-run."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_slime import BridgeStore, DiskWeightSync, RunnerThread, SamplingParams, SGLangClient
from agl_slime.agent.session import RolloutSession
from agl_slime.cli.demo.agent import LookupAgent
from agl_slime.data.results import Outcome
from agl_slime.data.source import GroupSource
from agl_slime.engine.process import EmbeddedEngine
from agl_slime.support.agl import LLM, EnqueueRolloutRequest, RolloutConfig
from agl_slime.tokens.loading import load_tokenizer
from agl_slime.tokens.template import ChatTemplate
from tests.harness.loop_thread import in_thread
from tests.harness.routers import sglang_router
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer

pytestmark = [
    pytest.mark.slime,
    pytest.mark.skipif(
        importlib.util.find_spec("sglang_router") is None, reason="needs the router: pip install sglang-router==0.3.2"
    ),
]


@pytest.fixture
def engines(policy_dir: Path) -> Iterator[list[EmbeddedEngine]]:
    with EmbeddedEngine(policy_dir) as one, EmbeddedEngine(policy_dir) as two:
        yield [one, two]


def get(url: str, path: str) -> dict[str, object]:
    with urllib.request.urlopen(url + path, timeout=10) as answer:
        return json.load(answer)


def sampled(engine: EmbeddedEngine) -> int:
    return int(str(get(engine.url, "/server_info")["tokens_sampled"]))


async def hit_rate(url: str, *, keyed: bool, rollouts: int = 24, turns: int = 5) -> tuple[float, float]:
    """Of conversations that take turns in asking: the part of their prompts that an engine had, and the part that one
    with all earlier turns of the conversation has."""
    tokenizer, sampling = small_tokenizer(), SamplingParams(max_new_tokens=8)
    asked: list[RolloutSession] = []
    async with SGLangClient(base_url=url) as client:
        for number in range(rollouts):
            first = [{"role": "user", "content": f"{number} asks: " + "what " * (number % 7)}]
            how: Any = {"template": ChatTemplate(tokenizer=tokenizer), "sampling": sampling, "messages": first}
            named = f"rollout-{number}" if keyed else ""
            asked.append(RolloutSession(client=client, rollout_id=named, traced=False, **how))
        for turn in range(turns):
            for session in random.Random(turn).sample(asked, len(asked)):
                said = {"role": "user", "content": f"and {turn}?"}
                await (session.ask(said) if turn else session.ask())
    had = sum(turn.cached_tokens for session in asked for turn in session.turns)
    could = sum(turn.kept_tokens for session in asked for turn in session.turns)
    prompts = sum(len(turn.prompt_ids) for session in asked for turn in session.turns)
    return had / prompts, could / prompts


async def test_routing_key_raises_the_prefix_cache_hit_rate():
    """Two engines that say how much of a prompt they had, behind the router."""
    engines = [ScriptedEngine(vocab_size=402, cached_answers=10_000, decode=lambda ids: "so") for _ in range(4)]
    shown = {}
    for keyed in (True, False):
        one, two = engines[2 * keyed : 2 * keyed + 2]
        with in_thread(one), in_thread(two), sglang_router([one.url, two.url]) as url:
            shown[keyed], most = await hit_rate(url, keyed=keyed)
            if keyed:
                assert shown[True] >= most  # all that there is, and what other conversations begin with
        assert min(engine.calls["/generate"] for engine in (one, two)) > 20  # both worked
    assert shown[True] > 0.6
    assert shown[False] < 0.85 * shown[True], shown


async def test_the_requests_of_one_rollout_stay_on_one_worker(engines: list[EmbeddedEngine]):
    sampling = SamplingParams(max_new_tokens=4)
    chosen: list[int] = []
    with sglang_router([engine.url for engine in engines]) as url:
        async with SGLangClient(base_url=url) as client:
            for key in range(12):
                before = [sampled(engine) for engine in engines]
                for _ in range(4):
                    await client.generate([5, 6, 7], sampling, routing_key=f"rollout-{key}")
                grown = [sampled(engine) > count for engine, count in zip(engines, before, strict=True)]
                assert sum(grown) == 1, f"the four requests of rollout {key} went to {sum(grown)} workers"
                chosen.append(grown.index(True))
    assert set(chosen) == {0, 1}


async def test_a_weight_sync_through_the_router_reaches_both_workers(
    engines: list[EmbeddedEngine], policy_dir: Path, tmp_path: Path
):
    weights = shutil.copytree(policy_dir, tmp_path / "weights")
    with sglang_router([engine.url for engine in engines]) as url:
        workers = await DiskWeightSync(base_url=url).push(str(weights), "17")
    assert len(workers) == 2
    assert [get(engine.url, "/model_info")["weight_version"] for engine in engines] == ["17", "17"]


def test_a_worker_that_dies_in_the_middle_of_a_run_loses_nothing(engines: list[EmbeddedEngine], policy_dir: Path):
    groups, size = 24, 4
    rng = random.Random(0)
    agent = LookupAgent()
    store = BridgeStore()
    ended = 0

    def one_ended(_: object) -> None:
        nonlocal ended
        ended += 1
        if ended == groups:  # a quarter of the way
            engines[1]._process.kill()  # type: ignore[union-attr]  # as the kernel would: no goodbye

    flags = ["--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--cb-failure-threshold", "2"]
    with sglang_router([engine.url for engine in engines], flags=flags) as url:
        unsubscribe = store.subscribe_finished(one_ended)
        llm = LLM(endpoint=url, model=str(policy_dir), sampling_parameters={"temperature": 1.0, "max_new_tokens": 48})
        asyncio.run(store.add_resources({"main_llm": llm}))
        config = RolloutConfig(
            timeout_seconds=120, max_attempts=3, retry_condition=["failed", "timeout", "unresponsive"]
        )
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
