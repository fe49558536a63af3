"""The gateway beside a store, for agents that other runners execute, and under Agent Lightning's own Trainer."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agl_slime.agent.access import EngineAccess
from agl_slime.cli.main import main
from agl_slime.errors import ConfigError
from agl_slime.gateway.remote import StoreGateway
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import RemoteStore
from agl_slime.store.server import StoreService
from agl_slime.support.agl import LLM, EnqueueRolloutRequest, ProxyLLM
from agl_slime.tokens.segments import merge_turns
from agl_slime.tokens.span_codec import decode_turns
from tests.harness.gateway import BODY, HELLO, QUICK, TEMPLATE, engine_saying, trained_once
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer
from tests.tools.record.test_record import server_process


@contextlib.contextmanager
def beside(store: Any, *says: str, token: str | None = "secret") -> Iterator[tuple[StoreGateway, ScriptedEngine]]:
    tokenizer = small_tokenizer(TEMPLATE)
    engine = engine_saying(tokenizer, says)
    with in_thread(engine):
        llm = LLM(endpoint=engine.url, model="scripted", sampling_parameters={"max_new_tokens": 64})
        access = EngineAccess(tokenizer=tokenizer, settings=QUICK)
        with StoreGateway(store=store, llm=llm, token=token, access=access) as gateway:
            yield gateway, engine


async def begun(store: Any) -> tuple[str, str]:
    """The ids of a rollout that a runner has taken, and of its attempt."""
    await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={}, mode="train")])
    [rollout] = await store.dequeue_many_rollouts(limit=1, worker_id="w")
    return rollout.rollout_id, rollout.attempt.attempt_id


def chats_url(gateway: StoreGateway, rollout_id: str, attempt_id: str) -> str:
    proxy = ProxyLLM(endpoint=gateway.endpoint, model="m")
    return f"{proxy.get_base_url(rollout_id, attempt_id)}/chat/completions"


async def eventually_ended(http: httpx.AsyncClient, url: str) -> bool:
    for _ in range(200):
        if (status := (await http.post(url, json=BODY)).status_code) == 410:
            return True
        assert status == 200
        await asyncio.sleep(0.05)
    return False


@pytest.mark.parametrize("remote", [False, True], ids=["in_process", "over_http"])
async def test_spans_are_stored_before_the_answer_and_ended_attempts_get_410(remote: bool) -> None:
    store = BridgeStore()
    with contextlib.ExitStack() as stack:
        store_or_client: Any = store
        if remote:
            store_or_client = RemoteStore(stack.enter_context(StoreService(store=store)).url)
        gateway, _ = stack.enter_context(beside(store_or_client, "one", "two", "three", "four"))
        rollout_id, attempt_id = await begun(store)
        url = chats_url(gateway, rollout_id, attempt_id)
        assert "/rollout/" in url
        async with httpx.AsyncClient() as http:
            answers = await asyncio.gather(*(http.post(url, json=BODY) for _ in range(2)))
            assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
            assert len(decode_turns(await store.query_spans(rollout_id, attempt_id))) == 2
            history = [*HELLO, answers[0].json()["choices"][0]["message"], {"role": "user", "content": "And?"}]
            await asyncio.gather(*(http.post(url, json={**BODY, "messages": history}) for _ in range(2)))
            turns = decode_turns(await store.query_spans(rollout_id, attempt_id))
            assert len(turns) == 4
            trained_once(turns, merge_turns(turns))
            assert (await http.post(url.replace(attempt_id, "at-none"), json=BODY)).status_code == 404
            assert (await http.post(url.replace("/k/secret", ""), json=BODY)).status_code == 401
            await store.update_attempt(rollout_id, attempt_id, status="succeeded")
            assert await eventually_ended(http, url)


async def test_attempt_ended_while_the_store_was_down_is_410_and_others_continue() -> None:
    store = BridgeStore()
    with contextlib.ExitStack() as stack:
        service = StoreService(store=store).start()
        stack.callback(service.stop)
        client = RemoteStore(service.url)
        gateway, _ = stack.enter_context(beside(client, "one", "two", "three"))
        attempts = [await begun(store) for _ in range(2)]
        ended, runs = (chats_url(gateway, *attempt) for attempt in attempts)
        async with httpx.AsyncClient() as http:
            assert [(await http.post(url, json=BODY)).status_code for url in (ended, runs)] == [200, 200]
            port = int(service.url.rsplit(":", 1)[1])
            service.stop()
            await store.update_attempt(*attempts[0], status="succeeded")  # no event of it reaches the gateway
            stack.enter_context(StoreService(store=store, port=port))
            assert await eventually_ended(http, ended)
            assert (await http.post(runs, json=BODY)).status_code == 200
    await client.close()


async def test_an_attempt_that_another_gateway_answered_is_refused_by_the_next() -> None:
    store = BridgeStore()
    rollout_id, attempt_id = await begun(store)
    answers = []
    for _ in range(2):  # a gateway, and its successor, which has none of the conversation
        with beside(store, "one") as (gateway, _):
            async with httpx.AsyncClient() as http:
                answers.append(await http.post(chats_url(gateway, rollout_id, attempt_id), json=BODY))
    assert answers[0].status_code == 200
    assert (answers[1].status_code, answers[1].json()["error"]["code"]) == (410, "attempt_lost")
    assert len(decode_turns(await store.query_spans(rollout_id, attempt_id))) == 1


async def test_token_level_agent_gets_the_engines_address() -> None:
    with beside(BridgeStore(), "one") as (gateway, engine):
        access = EngineAccess()
        llm = await access.engine(ProxyLLM(endpoint=gateway.endpoint, model="m", sampling_parameters={"max_tokens": 5}))
        assert (llm.endpoint, llm.sampling_parameters) == (engine.url, {"max_tokens": 5})
        with pytest.raises(ConfigError, match="no gateway"):
            await access.engine(ProxyLLM(endpoint=engine.url, model="m"))
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{gateway.url}/engine")).status_code != 200


@pytest.mark.slow
async def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    tokenizer, store = small_tokenizer(TEMPLATE), BridgeStore()
    tokenizer.save_pretrained(tmp_path)
    engine = engine_saying(tokenizer, ["one"])
    with StoreService(store=store) as service, in_thread(engine):
        rollout_id, attempt_id = await begun(store)
        command = [sys.executable, "-m", "agl_slime", "gateway", "--store-url", service.url]
        command += ["--sglang-url", engine.url, "--model-path", str(tmp_path)]
        with server_process(command, AGL_SLIME_GATEWAY_TOKEN="secret") as (child, url):
            url = f"{url.removesuffix('/v1')}/k/secret/rollout/{rollout_id}/attempt/{attempt_id}/v1/chat/completions"
            answer = await asyncio.to_thread(httpx.post, url, json=BODY, timeout=30)
            assert answer.status_code == 200, answer.text
            child.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(child.wait, 20) == 0
        assert len(decode_turns(await store.query_spans(rollout_id, attempt_id))) == 1


def test_it_is_closed_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    settings = GatewaySettings(host="0.0.0.0")
    with pytest.raises(ConfigError, match="AGL_SLIME_GATEWAY_TOKEN"):
        StoreGateway(store=BridgeStore(), llm=LLM(endpoint="http://127.0.0.1:9", model="m"), settings=settings)
    assert GatewaySettings().host == "127.0.0.1"
    flags = ["--store-url", "http://127.0.0.1:9", "--sglang-url", "http://127.0.0.1:9", "--model-path", "/none"]
    assert main(["gateway", *flags]) == 2
    assert "--model-path /none" in capsys.readouterr().err
