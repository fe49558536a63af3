"""A gateway of several processes: each attempt lives in one, and a worker that is killed costs its attempts one typed
answer, loses no span and trains nothing twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agl_slime.demo.agent import LookupAgent
from agl_slime.errors import ConfigError
from agl_slime.gateway.front import Front, worker_of
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.gateway.workers import WorkerSpec, serving_workers
from agl_slime.run.parts import RunParts, model_for_agents
from agl_slime.run.settings import TrainConfig
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.server import StoreService
from agl_slime.support.agl import LLM, EnqueueRolloutRequest
from agl_slime.trace.span_codec import decode_turns
from tests.faults import kill_gateway
from tests.faults.scripted_engine import ScriptedEngine, in_thread
from tests.gateway_cases import TEMPLATE, engine_saying
from tests.trace_tokenizers import small_tokenizer

BODY = {"model": "m", "messages": [{"role": "user", "content": "Hello?"}]}
NEXT = [{"role": "assistant", "content": "one"}, {"role": "user", "content": "And?"}]
MORE = {"model": "m", "messages": [*BODY["messages"], *NEXT]}


@asynccontextmanager
async def two_workers(
    path: Path, host: str = "127.0.0.1"
) -> AsyncIterator[tuple[Front, BridgeStore, ScriptedEngine, list[tuple[str, str]]]]:
    """Two workers before a scripted engine, and eight attempts of a store that run."""
    tokenizer = small_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(path)
    store, engine = BridgeStore(), engine_saying(tokenizer, ["one"])
    with StoreService(store=store) as service, in_thread(engine):
        await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={}, mode="train")] * 8)
        rollouts = await store.dequeue_many_rollouts(limit=8, worker_id="w")
        llm = LLM(endpoint=engine.url, model=str(path), sampling_parameters={"max_new_tokens": 64})
        settings = GatewaySettings(host=host)
        spec = WorkerSpec(store_url=service.url, store_token=None, llm=llm, token="secret", settings=settings)
        async with serving_workers(spec, 2) as front:
            attempts = [(rollout.rollout_id, rollout.attempt.attempt_id) for rollout in rollouts]
            yield front, store, engine, attempts


def address(front: Front, attempt: tuple[str, str]) -> str:
    return f"{front.url}/k/secret/rollout/{attempt[0]}/attempt/{attempt[1]}/v1/chat/completions"


def home(attempt: tuple[str, str]) -> int:
    return worker_of(f"/rollout/{attempt[0]}/attempt/{attempt[1]}/v1".encode(), 2)


@pytest.mark.slow
async def test_killed_gateway_worker_fails_its_attempts_only(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (front, store, _, attempts), httpx.AsyncClient(timeout=60) as http:
        answers = [await http.post(address(front, attempt), json=BODY) for attempt in attempts]
        assert [answer.status_code for answer in answers] == [200] * 8, answers[0].text
        lost = [attempt for attempt in attempts if home(attempt) == 0]
        kept = [attempt for attempt in attempts if home(attempt) == 1]
        killed = front.pids()[0]
        os.kill(killed, signal.SIGKILL)
        for attempt in kept:
            assert (await http.post(address(front, attempt), json=MORE)).status_code == 200
        for attempt in lost:  # answered by the worker that took its place
            answer = await http.post(address(front, attempt), json=MORE)
            if answer.status_code == 503:  # it was dying
                assert answer.json()["error"]["code"] == "gateway_worker_lost"
                answer = await http.post(address(front, attempt), json=MORE)
            assert (answer.status_code, answer.json()["error"]["code"]) == (410, "attempt_lost")
        assert front.pids()[0] != killed
        for attempt in attempts:  # what was answered is there, once, and conversations that went on are one
            turns = decode_turns(await store.query_spans(*attempt))
            assert len(turns) == (2 if attempt in kept else 1)


@pytest.mark.slow
async def test_a_call_that_is_under_way_gets_one_typed_answer(tmp_path: Path) -> None:
    async with two_workers(tmp_path) as (front, _, engine, attempts), httpx.AsyncClient(timeout=60) as http:
        engine.latency_s = 30.0  # longer than this test
        attempt = attempts[0]
        asking = asyncio.ensure_future(http.post(address(front, attempt), json=BODY))
        while not engine.running:
            await asyncio.wait({asking}, timeout=0.02)
            assert not asking.done()
        os.kill(front.pids()[home(attempt)], signal.SIGKILL)
        answer = await asking
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "gateway_worker_lost")
        assert "Retry-After" in answer.headers


@pytest.mark.slow
@pytest.mark.parametrize(("host", "status"), [("0.0.0.0", 200), ("127.0.0.1", 403)])
async def test_front_for_other_hosts_accepts_their_host_header(tmp_path: Path, host: str, status: int) -> None:
    async with two_workers(tmp_path, host) as (front, _, _, attempts), httpx.AsyncClient(timeout=60) as http:
        answer = await http.post(address(front, attempts[0]), json=BODY, headers={"Host": "trainer:8080"})
        assert answer.status_code == status, answer.text


@pytest.mark.slow
def test_killed_gateway_workers_lose_no_group_and_none_is_trained_twice(tmp_path: Path) -> None:
    result = kill_gateway.run(tmp_path, kills=3, seed=0, limit_s=300)
    assert result.good, result
    assert result.trained == result.tasks > 0  # groups whose members were lost have begun them again


def test_what_needs_no_gateway_workers_refuses_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--gateway-workers 2 with --store-host 0\\.0\\.0\\.0: agents ask the"):
        TrainConfig(model_path=tmp_path, gateway_workers=2, runners="ray:2", store_host="0.0.0.0")
    with pytest.raises(ConfigError, match="--gateway-workers must be at least 1"):
        TrainConfig(model_path=tmp_path, gateway_workers=0)
    config, parts = TrainConfig(model_path=tmp_path, gateway_workers=2), RunParts(tasks=["a"], agent=LookupAgent())
    with (
        pytest.raises(ConfigError, match="--gateway-workers 2: LookupAgent asks the engine and needs no gateway"),
        model_for_agents(config, parts, url="http://127.0.0.1:9", model_path=tmp_path),
    ):
        raise AssertionError


@pytest.mark.slow
async def test_a_worker_that_cannot_start_is_one_sentence(tmp_path: Path) -> None:
    wrong: Any = "nobody.invalid host"
    spec = WorkerSpec(store_url="http://127.0.0.1:9", store_token=None, llm=wrong, token=None, settings=Unpicklable())
    with pytest.raises(ConfigError, match="gateway worker 0 ended with exit code 1 before it listened"):
        async with serving_workers(spec, 1):
            raise AssertionError


class Unpicklable(GatewaySettings):
    """Cannot be read in the worker."""

    def __reduce__(self) -> Any:
        return int, ("x",)


def test_an_attempt_has_one_home_however_it_is_asked() -> None:
    forms = (b"/rollout/r1/attempt/a1/v1/messages", b"/k/s/rollout/r1/attempt/a1/chat/completions?x=1")
    for n in (1, 2, 7):
        assert len({worker_of(b"POST %s HTTP/1.1" % form, n) for form in forms}) == 1
    homes = {worker_of(b"/rollout/r%d/attempt/a" % number, 4) for number in range(64)}
    assert homes == {0, 1, 2, 3}
