"""The unmodified controller of Agent Lightning 1.x in its Kubernetes mode, over a stand-in of the Kubernetes API."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agl_slime.data.read import collect
from agl_slime.gateway.agl1.settings import PYTHON_VARIABLE, ControllerSettings
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.controller import ControllerPool
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, RolloutConfig
from agl_slime.support.threads import run_blocking
from tests.gateway.agl1.kubernetes_stub import KubernetesStub
from tests.harness.gateway import TEMPLATE, engine_saying
from tests.harness.loop_thread import in_thread
from tests.harness.tokenizers import small_tokenizer

pytestmark = [
    pytest.mark.controller,
    pytest.mark.skipif(
        not os.environ.get(PYTHON_VARIABLE), reason=f"{PYTHON_VARIABLE} names no Python with agentlightning 1.x"
    ),
]
KEY = "the-key"
TEMPLATE_OF_A_JOB = """
apiVersion: batch/v1
kind: Job
spec:
  template:
    spec:
      containers:
        - name: agent
          image: example/agent
          env:
            - name: QUESTION
              value: {{ input.question | yaml_escape }}
            - name: AGL_KEY
              valueFrom: {secretKeyRef: {name: agl, key: key}}
"""


def container(environment: dict[str, str]) -> str:
    """What an agent in a pod would do; its question says how it ends."""
    question, headers = environment["QUESTION"], {"Authorization": f"Bearer {environment['AGL_KEY']}"}
    body = {"model": "auto", "messages": [{"role": "user", "content": question}]}
    url = f"{environment['AGL_OPENAI_BASE_URL']}/chat/completions"
    httpx.post(url, json=body, headers=headers, timeout=30).raise_for_status()
    if question != "Complete":
        return question
    event = {"event_type": "reward", "data": {"value": 1.0}}
    httpx.post(environment["AGL_EVENT_URL"], json=event, headers=headers).raise_for_status()
    return "Complete"


@contextmanager
def kubernetes(kubeconfig: Path) -> Iterator[KubernetesStub]:
    stub, ready = KubernetesStub(container), threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(stub.serve(kubeconfig, stop, ready.set),))
    thread.start()
    assert ready.wait(10)
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


@contextmanager
def controller(url: str, kubeconfig: Path, log: Path) -> Iterator[None]:
    flags = ["runner_type=k8s", f"agl_server.url={url}", f"agl_server.key={KEY}", "k8s_runner.poll_interval=0.3"]
    quiet = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    command = [os.environ[PYTHON_VARIABLE], "-m", "agentlightning.controller", *flags, *quiet]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env={**os.environ, "KUBECONFIG": str(kubeconfig)}, stdout=out, stderr=out)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def test_jobs_are_made_from_the_template_and_their_ends_come_back(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "model")
    template, log = tmp_path / "job.yaml", tmp_path / "controller.log"
    template.write_text(TEMPLATE_OF_A_JOB)
    store = BridgeStore()
    settings = ControllerSettings(job_template=template, key=KEY)
    pool = ControllerPool(plan=RunnerPlan(kind="controller", controller=settings), store=store)
    with in_thread(engine_saying(tokenizer, ["four"])) as engine, pool, kubernetes(tmp_path / "config") as cluster:
        llm = LLM(endpoint=engine.url, model=str(tmp_path / "model"), sampling_parameters={"max_new_tokens": 32})
        run_blocking(store.add_resources({"main_llm": llm}))
        ends = ["Complete", "Failed", "gone", "Complete"]
        config = RolloutConfig(timeout_seconds=90)
        asked = [store.enqueue_rollout(input={"question": end}, mode="train", config=config) for end in ends]
        rollouts = [run_blocking(one) for one in asked]
        ids = [rollout.rollout_id for rollout in rollouts]
        with controller(pool.gateway.url, tmp_path / "config", log):
            ended = run_blocking(store.wait_for_rollouts(rollout_ids=ids, timeout=60))
        assert len(ended) == len(ids), log.read_text()
        members: list[Any] = [run_blocking(collect(store, rollout_id)) for rollout_id in ids]
        url = pool.gateway.url
    assert [member.failure for member in members] == [None, "agent_failed", "agent_lost", None]
    assert [member.reward for member in members if member.failure is None] == [1.0, 1.0]
    assert all(member.turns == 1 for member in members)
    (job,) = (one for one in cluster.created if one["metadata"]["name"] == f"agl-rollout-{ids[0]}")
    assert job["metadata"]["labels"]["agentlightning/rollout-id"] == ids[0]
    pod = job["spec"]["template"]["spec"]
    limits = {name: value for name, value in job["spec"].items() if name != "template"}
    assert limits == {"backoffLimit": 0, "ttlSecondsAfterFinished": 1200, "activeDeadlineSeconds": 90}
    assert pod["restartPolicy"] == "Never"
    # the key stands in the Job, whatever the template says of it
    assert {one["name"]: one["value"] for one in pod["containers"][0]["env"]} == {
        "QUESTION": "Complete",
        "AGL_KEY": KEY,
        "AGL_OPENAI_BASE_URL": f"{url}/proxy/rollout/{ids[0]}/attempt/0/mode/train/openai/v1",
        "AGL_EVENT_URL": f"{url}/api/rollouts/{ids[0]}/attempt/0/events",
    }
