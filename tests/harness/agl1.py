"""Agent Lightning 1.0's API over a store, a scripted engine, and a client with the key."""

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from agl_slime.agent.access import EngineAccess
from agl_slime.gateway.agl1.schemas import Config, LocalConfig
from agl_slime.gateway.agl1.server import ControllerGateway
from agl_slime.gateway.agl1.settings import PYTHON_VARIABLE
from agl_slime.runner.controller_process import end_agents
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_blocking
from tests.harness.gateway import QUICK, TEMPLATE, engine_saying
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer


@dataclass
class Api:
    store: BridgeStore
    gateway: ControllerGateway
    engine: ScriptedEngine
    tokenizer: Any
    http: httpx.Client

    def create(self, **fields: Any) -> str:
        answer = self.http.post("/api/rollouts", json=[{"input": {"question": "2+2?"}, **fields}])
        assert answer.status_code == 201, answer.text
        return answer.json()[0]["rollout_id"]

    def state(self, rollout_id: str) -> str:
        return self.http.get(f"/api/rollouts/{rollout_id}").json()["rollout"]["status"]["state"]

    def patch(self, rollout_id: str, **status: Any) -> httpx.Response:
        return self.http.patch(f"/api/rollouts/{rollout_id}", json={"status": status})

    def ask(
        self, rollout_id: str, *, mode: str = "train", path: str = "openai/v1/chat/completions", **body: Any
    ) -> Any:
        messages = [{"role": "user", "content": "2+2?"}]
        question = {} if {"prompt", "input"} & body.keys() else {"messages": messages}
        address = f"/proxy/rollout/{rollout_id}/attempt/0/mode/{mode}/{path}"
        return self.http.post(address, json={"model": "auto", **question, **body})

    def reward(self, rollout_id: str, value: Any, **fields: Any) -> httpx.Response:
        event = {"event_type": "reward", "data": {"value": value, **fields}}
        return self.http.post(f"/api/rollouts/{rollout_id}/attempt/0/events", json=event)

    def events(self, rollout_id: str, **query: str) -> list[dict[str, Any]]:
        return self.http.get(f"/api/rollouts/{rollout_id}/events", params=query).json()


@contextmanager
def serving_api(*answers: str, key: str | None = "the-key") -> Iterator[Api]:
    tokenizer = small_tokenizer(TEMPLATE)
    engine, store = engine_saying(tokenizer, answers or ("four",)), BridgeStore()
    access = EngineAccess(tokenizer=tokenizer, settings=QUICK)
    config = Config(local=LocalConfig(agent_class="my_agent:Agent", env_map={"QUESTION": "input.question"}))
    gateway = ControllerGateway(store=store, key=key, config=config, access=access)
    with ExitStack() as stack:
        stack.enter_context(in_thread(engine))
        stack.enter_context(gateway)
        sampling = {"temperature": 1.0, "max_new_tokens": 64}
        llm = LLM(endpoint=engine.url, model="scripted", sampling_parameters=sampling)
        run_blocking(store.add_resources({"main_llm": llm}))
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        client = stack.enter_context(httpx.Client(base_url=gateway.url, headers=headers, timeout=20))
        yield Api(store, gateway, engine, tokenizer, client)


@contextmanager
def local_controller(
    url: str,
    log: Path,
    *,
    paths: Path,
    key: str = "none",
    at_once: int = 3,
    environment: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """The unmodified controller for the server at ``url``; agents are imported from ``paths``."""
    flags = ["runner_type=local", f"agl_server.url={url}", f"agl_server.key={key}", "local_runner.poll_interval=0.2"]
    flags += [f"local_runner.maximum_size={at_once}", "hydra.run.dir=.", "hydra.output_subdir=null"]
    flags += ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    python_path = os.pathsep.join((str(paths), os.environ.get("PYTHONPATH", "")))
    command = [os.environ[PYTHON_VARIABLE], "-m", "agentlightning.controller", *flags]
    variables = {**os.environ, **(environment or {}), "PYTHONPATH": python_path}
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=out)
        try:
            yield
        finally:
            process.kill()
            process.wait()
            end_agents(url)
