"""The unmodified controller of Agent Lightning 1.x runs a store's rollouts: as a child process, started by hand, and in
its Kubernetes mode over a stand-in of the Kubernetes API."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from aiohttp import web

from agl_slime.data.read import collect
from agl_slime.gateway.agl1.settings import PYTHON_VARIABLE, ControllerSettings
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.controller import ControllerPool
from agl_slime.runner.controller_process import ControllerProcess, agents_of
from agl_slime.store.bridge import FINISHED, BridgeStore
from agl_slime.support.agl import LLM, RolloutConfig
from agl_slime.support.http import listening
from agl_slime.support.threads import run_blocking, run_in_thread
from tests.harness.agl1 import local_controller
from tests.harness.gateway import TEMPLATE, engine_saying
from tests.harness.loop_thread import in_thread
from tests.harness.tokenizers import small_tokenizer

pytestmark = [
    pytest.mark.controller,
    pytest.mark.skipif(
        not os.environ.get(PYTHON_VARIABLE), reason=f"{PYTHON_VARIABLE} names no Python with agentlightning 1.x"
    ),
]
AGENTS = Path(__file__).parents[2] / "programs" / "agents"
TASK = {"question": "2+2?", "label": "four"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BridgeStore]:
    """A store with a model that answers "four"."""
    tokenizer, model = small_tokenizer(TEMPLATE), str(tmp_path / "model")
    tokenizer.save_pretrained(model)
    with in_thread(engine_saying(tokenizer, ["four"])) as engine:
        store = BridgeStore()
        sampling = {"temperature": 1.0, "max_new_tokens": 32}
        llm = LLM(endpoint=engine.url, model=model, sampling_parameters=sampling)
        run_blocking(store.add_resources({"main_llm": llm}))
        yield store


@pytest.fixture(autouse=True)
def agents_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(AGENTS), os.environ.get("PYTHONPATH", ""))))


def pool_of(agent: str, store: BridgeStore, **settings: Any) -> ControllerPool:
    env_map = ("QUESTION=input.question", "LABEL=input.label")
    controller = ControllerSettings(agent=f"agl1_agents:{agent}", env_map=env_map, **settings)
    return ControllerPool(plan=RunnerPlan(kind="controller", controller=controller), store=store)


def child_pool(agent: str, store: BridgeStore, log: Path, **settings: Any) -> ControllerPool:
    return pool_of(agent, store, python=Path(os.environ[PYTHON_VARIABLE]), log=log, **settings)


def enqueue(store: BridgeStore, count: int) -> list[str]:
    return [run_blocking(store.enqueue_rollout(input=TASK, mode="train")).rollout_id for _ in range(count)]


def run_rollouts(agent: str, store: BridgeStore, log: Path, count: int = 3) -> list[Any]:
    ids = enqueue(store, count)
    with child_pool(agent, store, log) as pool:
        ended = run_blocking(store.wait_for_rollouts(rollout_ids=ids, timeout=120))
        assert len(ended) == count, log.read_text()
        address = pool.gateway.url
    assert not list(agents_of(address))
    return [run_blocking(collect(store, rollout_id)) for rollout_id in ids]


def kill_controllers(pool: ControllerPool) -> None:
    for supervisor in [*pool._supervisor.children.values()]:
        with suppress(psutil.Error):
            for child in psutil.Process(supervisor.pid).children():
                child.send_signal(signal.SIGKILL)


def test_rollouts_of_a_child_controller_become_samples(store: BridgeStore, tmp_path: Path) -> None:
    for member in run_rollouts("TwoTurns", store, tmp_path / "controller.log"):
        assert (member.failure, member.reward, member.turns) == (None, 1.0, 2)
        (sample,) = member.samples
        assert sum(sample.loss_mask) == member.sampled_tokens


@pytest.mark.parametrize(
    ("agent", "reason"), [("WithoutReward", "no_reward"), ("Raises", "agent_failed"), ("Killed", "agent_failed")]
)
def test_agent_error_is_its_rollouts_failure_reason(
    store: BridgeStore, tmp_path: Path, agent: str, reason: str
) -> None:
    (member,) = run_rollouts(agent, store, tmp_path / "controller.log", count=1)
    assert (member.failure, member.turns) == (reason, 1)


def test_controllers_that_die_are_started_again_while_rollouts_succeed(store: BridgeStore, tmp_path: Path) -> None:
    """Twice, with one restart allowed: a rollout that succeeds gives it back. Each death costs the running rollouts."""
    succeeded: queue.SimpleQueue[str] = queue.SimpleQueue()
    store.subscribe_finished(lambda end: succeeded.put(end.rollout_id) if end.status == "succeeded" else None)
    ids = enqueue(store, 24)
    with child_pool("TwoTurns", store, tmp_path / "controller.log", max_processes=3, max_restarts=1) as pool:
        for _ in range(2):
            while not succeeded.empty():
                succeeded.get()
            succeeded.get(timeout=60)
            assert len(pool._supervisor.children) == 1
            kill_controllers(pool)
        ended = run_blocking(store.wait_for_rollouts(rollout_ids=ids, timeout=180))
        assert pool.failure is None
        assert len(ended) == 24
    assert all(rollout.status in FINISHED for rollout in ended)


def test_controller_that_dies_without_any_success_ends_the_run(store: BridgeStore, tmp_path: Path) -> None:
    with child_pool("TwoTurns", store, tmp_path / "controller.log", max_restarts=1) as pool:
        deadline = time.monotonic() + 60
        while pool.failure is None and time.monotonic() < deadline:
            time.sleep(0.05)  # no event announces a start of another process
            kill_controllers(pool)
        # the last process ends after it was ready, or while it starts
        assert re.match(r"the controller (has ended|for \S+ ended with exit code -9)", str(pool.failure)), pool.failure


def test_controller_ends_when_its_parent_is_killed() -> None:
    """As Ray kills the children of an actor, and no more, together with the actor."""
    settings = ControllerSettings(agent="an:Agent", python=Path(os.environ[PYTHON_VARIABLE]), key="k")
    child = ControllerProcess(settings, url="http://127.0.0.1:9")
    child.start()
    assert child.pid is not None
    controllers = psutil.Process(child.pid).children()
    try:
        assert len(controllers) == 1
        os.kill(child.pid, signal.SIGKILL)
        assert psutil.wait_procs(controllers, timeout=10)[1] == []
    finally:
        child.stop()


def test_two_controllers_with_names_share_a_run(store: BridgeStore, tmp_path: Path) -> None:
    ids = enqueue(store, 16)
    with pool_of("TwoTurns", store) as pool:
        url, logs = f"{pool.gateway.url}/controller", [tmp_path / "a.log", tmp_path / "b.log"]
        with local_controller(f"{url}/a", logs[0], paths=AGENTS), local_controller(f"{url}/b", logs[1], paths=AGENTS):
            ended = run_blocking(store.wait_for_rollouts(rollout_ids=ids, timeout=120))
        assert len(ended) == len(ids), "\n".join(log.read_text() for log in logs)
        members: list[Any] = [run_blocking(collect(store, rollout_id)) for rollout_id in ids]
        workers = {run_blocking(store.get_latest_attempt(rollout_id)).worker_id for rollout_id in ids}  # type: ignore[union-attr]
    assert [(member.failure, member.reward, member.turns) for member in members] == [(None, 1.0, 2)] * len(ids)
    assert workers == {"agl-controller/a", "agl-controller/b"}


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
_JOBS = "/apis/batch/v1/namespaces/{namespace}/jobs"
_VERSION = {"groupVersion": "batch/v1", "version": "v1"}
_GROUP = {"name": "batch", "versions": [_VERSION], "preferredVersion": _VERSION}
_JOB = {"name": "jobs", "singularName": "job", "namespaced": True, "kind": "Job", "shortNames": []}
_JOB["verbs"] = ["create", "delete", "get", "list", "patch", "watch"]
_DISCOVERY: dict[str, dict[str, Any]] = {
    "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "groups": [_GROUP]},
    "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
    "/apis/batch/v1": {"kind": "APIResourceList", "groupVersion": "batch/v1", "resources": [_JOB]},
}


def pod(environment: dict[str, str]) -> str:
    """An agent in a pod. Its question is the end of its Job: ``Complete``, ``Failed``, or ``gone`` for a Job that
    disappears."""
    question, headers = environment["QUESTION"], {"Authorization": f"Bearer {environment['AGL_KEY']}"}
    body = {"model": "auto", "messages": [{"role": "user", "content": question}]}
    url = f"{environment['AGL_OPENAI_BASE_URL']}/chat/completions"
    httpx.post(url, json=body, headers=headers, timeout=30).raise_for_status()
    if question == "Complete":
        event = {"event_type": "reward", "data": {"value": 1.0}}
        httpx.post(environment["AGL_EVENT_URL"], json=event, headers=headers).raise_for_status()
    return question


class KubernetesStub:
    """The part of the Kubernetes API that a controller uses: Jobs are created, listed and watched, and ``pod`` runs in
    place of a Job's container. It schedules, limits and isolates nothing."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.created: list[dict[str, Any]] = []
        self._watchers: set[asyncio.Queue[dict[str, Any]]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._version = 0

    @asynccontextmanager
    async def serving(self, kubeconfig: Path) -> AsyncIterator[KubernetesStub]:
        app = web.Application()
        routes: list[tuple[str, str, Any]] = [("GET", path, self._fixed(value)) for path, value in _DISCOVERY.items()]
        routes += [("GET", _JOBS, self._list), ("POST", _JOBS, self._create)]
        for method, path, handler in routes:
            for end in ("", "/"):
                app.router.add_route(method, path + end, handler)
        async with listening(app, host="127.0.0.1", port=0, backlog=64, shutdown_timeout=0.1) as url:
            names = {"context": {"cluster": "stub", "user": "stub", "namespace": "default"}}
            config = {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "stub",
                "clusters": [{"name": "stub", "cluster": {"server": url}}],
                "users": [{"name": "stub", "user": {"token": "stub"}}],
                "contexts": [{"name": "stub", **names}],
            }
            kubeconfig.write_text(json.dumps(config))
            yield self
            for task in self._tasks:
                task.cancel()

    def _fixed(self, value: Any) -> Callable[[web.Request], Any]:
        async def handler(request: web.Request) -> web.Response:
            return web.json_response(value)

        return handler

    async def _create(self, request: web.Request) -> web.Response:
        job = await request.json()
        name = job["metadata"]["name"]
        job["metadata"]["uid"] = f"uid-{len(self.created)}"
        self.jobs[name] = job
        self.created.append(json.loads(json.dumps(job)))
        self._notify("ADDED", job)
        task = asyncio.ensure_future(self._run(name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return web.json_response(job, status=201)

    async def _run(self, name: str) -> None:
        (container,) = self.jobs[name]["spec"]["template"]["spec"]["containers"]
        outcome = await run_in_thread(pod, {variable["name"]: variable["value"] for variable in container["env"]})
        if outcome == "gone":
            self._notify("DELETED", self.jobs.pop(name))
            return
        condition = {"type": outcome, "status": "True", "reason": "BackoffLimitExceeded"}
        self.jobs[name]["status"] = {"conditions": [condition]}
        self._notify("MODIFIED", self.jobs[name])

    def _notify(self, kind: str, job: dict[str, Any]) -> None:
        self._version += 1
        job["metadata"]["resourceVersion"] = str(self._version)
        for watcher in self._watchers:
            watcher.put_nowait({"type": kind, "object": json.loads(json.dumps(job))})

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("watch") not in ("true", "1"):
            version = {"resourceVersion": str(self._version)}
            jobs = [*self.jobs.values()]
            return web.json_response({"kind": "JobList", "apiVersion": "batch/v1", "metadata": version, "items": jobs})
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for job in self.jobs.values():
            events.put_nowait({"type": "ADDED", "object": job})
        self._watchers.add(events)
        try:
            while True:
                await response.write(json.dumps(await events.get()).encode() + b"\n")
        finally:
            self._watchers.discard(events)


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
            process.kill()
            process.wait()


def test_jobs_are_made_from_the_template_and_their_ends_come_back(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "model")
    template, config, log = tmp_path / "job.yaml", tmp_path / "config", tmp_path / "controller.log"
    template.write_text(TEMPLATE_OF_A_JOB)
    store = BridgeStore()
    settings = ControllerSettings(job_template=template, key=KEY)
    pool = ControllerPool(plan=RunnerPlan(kind="controller", controller=settings), store=store)
    serving = KubernetesStub().serving(config)
    with in_thread(engine_saying(tokenizer, ["four"])) as engine, pool, in_thread(serving) as cluster:
        llm = LLM(endpoint=engine.url, model=str(tmp_path / "model"), sampling_parameters={"max_new_tokens": 32})
        run_blocking(store.add_resources({"main_llm": llm}))
        limit = RolloutConfig(timeout_seconds=90)
        ids = [
            run_blocking(store.enqueue_rollout(input={"question": end}, mode="train", config=limit)).rollout_id
            for end in ("Complete", "Failed", "gone", "Complete")
        ]
        with controller(pool.gateway.url, config, log):
            ended = run_blocking(store.wait_for_rollouts(rollout_ids=ids, timeout=60))
        assert len(ended) == len(ids), log.read_text()
        members: list[Any] = [run_blocking(collect(store, rollout_id)) for rollout_id in ids]
        url = pool.gateway.url
    assert [member.failure for member in members] == [None, "agent_failed", "agent_lost", None]
    assert [member.reward for member in members if member.failure is None] == [1.0, 1.0]
    assert all(member.turns == 1 for member in members)
    (job,) = (job for job in cluster.created if job["metadata"]["name"] == f"agl-rollout-{ids[0]}")
    assert job["metadata"]["labels"]["agentlightning/rollout-id"] == ids[0]
    spec = job["spec"]["template"]["spec"]
    limits = {name: value for name, value in job["spec"].items() if name != "template"}
    assert limits == {"backoffLimit": 0, "ttlSecondsAfterFinished": 1200, "activeDeadlineSeconds": 90}
    assert spec["restartPolicy"] == "Never"
    # the key stands in the Job, whatever the template says of it
    assert {variable["name"]: variable["value"] for variable in spec["containers"][0]["env"]} == {
        "QUESTION": "Complete",
        "AGL_KEY": KEY,
        "AGL_OPENAI_BASE_URL": f"{url}/proxy/rollout/{ids[0]}/attempt/0/mode/train/openai/v1",
        "AGL_EVENT_URL": f"{url}/api/rollouts/{ids[0]}/attempt/0/events",
    }
