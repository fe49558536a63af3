"""A proxy in the environment that refuses, as clusters have one: a run's own addresses are reached without it."""

import asyncio
import os
import subprocess
import sys
from typing import Any

import httpx
import pytest

from agl_slime.buffer.generators.base_generator import BaseGenerator
from agl_slime.cli.main import main
from agl_slime.runner.base import RunnerSettings
from agl_slime.runner.concurrent import RunnerThread
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, EnqueueRolloutRequest, LitAgent
from agl_slime.support.net import bypass_proxies, free_port, hosts_behind_proxy
from agl_slime.tools.doctor.command import examine
from tests.harness.gateway import engine_saying
from tests.harness.loop_thread import in_thread
from tests.harness.servers import server_that_answers
from tests.harness.tokenizers import small_tokenizer


@pytest.fixture(autouse=True)
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "all_proxy", "no_proxy"):
        for spelling in (name, name.upper()):
            monkeypatch.setenv(spelling, "")  # so that it is restored
            monkeypatch.delenv(spelling)
    address = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("HTTP_PROXY", address)
    monkeypatch.setenv("http_proxy", address)


ASK = """
import json, sys, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello?"}]}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + sys.argv[2]}
answer = urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/chat/completions", body, headers), timeout=20)
print(json.load(answer)["choices"][0]["message"]["content"])
"""


class AskingAgent(LitAgent[Any]):
    """Asks the gateway with a client that trusts the environment, here and in another process."""

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
        llm = resources["main_llm"]
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello?"}]}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {llm.api_key}"}) as client:
            answer = await client.post(f"{llm.endpoint}/chat/completions", json=body)
        answer.raise_for_status()
        command = [sys.executable, "-c", ASK, llm.endpoint, llm.api_key]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
        assert done.stdout == "hello\n"
        return 1.0


async def test_agents_reach_the_gateway_past_the_proxy() -> None:
    tokenizer = small_tokenizer()
    with in_thread(engine_saying(tokenizer, ["hello"])) as engine:
        store = BridgeStore()
        await store.add_resources({"main_llm": LLM(endpoint=engine.url, model="scripted")})
        runner = RunnerThread(agent=AskingAgent(), store=store, settings=RunnerSettings(poll_interval_s=0.01))
        init = runner.runner.init

        def init_with_tokenizer(*args: Any, **kwargs: Any) -> None:
            init(*args, **kwargs)
            assert runner.runner._gateway is not None
            runner.runner._gateway.access._tokenizer = tokenizer

        runner.runner.init = init_with_tokenizer  # type: ignore[method-assign]
        with runner:
            [rollout] = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1, mode="train")])
            done = await asyncio.wait_for(store.wait_for_rollout(rollout.rollout_id, timeout=30), 35)
    assert done is not None
    assert done.status == "succeeded"


def test_clients_of_this_package_bypass_the_proxy() -> None:
    with server_that_answers(200, b'{"object": "list", "data": []}') as url:
        generator = BaseGenerator(url, "http://127.0.0.1:1", task_type="math")
        with generator._make_client(False) as client:
            assert client.models.list().data == []

        async def ask() -> None:
            async with generator._make_client(True) as client:
                assert (await client.models.list()).data == []

        asyncio.run(ask())
    assert hosts_behind_proxy() == ["127.0.0.1", "localhost"]  # NO_PROXY is still empty


def test_no_proxy_entries_are_kept_and_extended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", ".cluster, 10.0.0.1")
    monkeypatch.setenv("no_proxy", "localhost")
    bypass_proxies("10.0.0.7", "10.0.0.1")
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == ".cluster,10.0.0.1,localhost,127.0.0.1,10.0.0.7"
    monkeypatch.setenv("NO_PROXY", "*")
    bypass_proxies("10.0.0.9")
    assert os.environ["NO_PROXY"] == "*"
    for name in ("NO_PROXY", "no_proxy", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name)
    bypass_proxies("10.0.0.7")
    assert "NO_PROXY" not in os.environ


def test_doctor_names_the_proxy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    main(["doctor"])
    assert "NO_PROXY=127.0.0.1,localhost" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    [line] = [line for line in examine() if line.name == "proxy"]
    assert line.verdict == "ok"
