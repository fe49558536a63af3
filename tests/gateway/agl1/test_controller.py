"""The unmodified controller of Agent Lightning 1.x, as a child process, runs a store's rollouts."""

from __future__ import annotations

import os
import queue
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.data.read import collect
from agl_slime.engine.sglang_process import SGLANG_PYTHON
from agl_slime.errors import ConfigError
from agl_slime.gateway.agl1.settings import PYTHON_VARIABLE, ControllerSettings
from agl_slime.report import read_metrics
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.controller import ControllerPool
from agl_slime.runner.controller_process import ControllerProcess, agents_of, check_python
from agl_slime.store.bridge import FINISHED, BridgeStore
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_blocking
from tests.harness.agl1 import serving_api
from tests.harness.gateway import TEMPLATE, engine_saying
from tests.harness.loop_thread import in_thread
from tests.harness.tokenizers import small_tokenizer
from tests.harness.train_process import train

pytestmark = [
    pytest.mark.controller,
    pytest.mark.skipif(
        not os.environ.get(PYTHON_VARIABLE), reason=f"{PYTHON_VARIABLE} names no Python with agentlightning 1.x"
    ),
]
_AGENTS = "agl1_agents"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[str, str]]:
    tokenizer = small_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "model")
    with in_thread(engine_saying(tokenizer, ["four"])) as served:
        yield served.url, str(tmp_path / "model")


def pool_of(agent: str, store: BridgeStore, log: Path, **settings: Any) -> ControllerPool:
    controller = ControllerSettings(
        agent=f"{_AGENTS}:{agent}",
        env_map=("QUESTION=input.question", "LABEL=input.label"),
        python=Path(os.environ[PYTHON_VARIABLE]),
        log=log,
        **settings,
    )
    return ControllerPool(plan=RunnerPlan(kind="controller", controller=controller), store=store)


def run_rollouts(agent: str, engine: tuple[str, str], tmp_path: Path, count: int = 3) -> list[Any]:
    url, model = engine
    store = BridgeStore()
    sampling = {"temperature": 1.0, "max_new_tokens": 32}
    run_blocking(store.add_resources({"main_llm": LLM(endpoint=url, model=model, sampling_parameters=sampling)}))
    task = {"question": "2+2?", "label": "four"}
    ids = [run_blocking(store.enqueue_rollout(input=task, mode="train")).rollout_id for _ in range(count)]
    with pool_of(agent, store, tmp_path / "controller.log") as pool:
        ended = run_blocking(store.wait_for_rollouts(rollout_ids=ids, timeout=120))
        assert len(ended) == count, (tmp_path / "controller.log").read_text()
        address = pool.gateway.url
    assert not list(agents_of(address))
    return [run_blocking(collect(store, rollout_id)) for rollout_id in ids]


@pytest.fixture(autouse=True)
def agents_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = (str(Path(__file__).parents[2] / "programs" / "agents"), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def test_rollouts_of_a_child_controller_become_samples(engine: tuple[str, str], tmp_path: Path) -> None:
    for member in run_rollouts("TwoTurns", engine, tmp_path):
        assert (member.failure, member.reward, member.turns) == (None, 1.0, 2)
        (sample,) = member.samples
        assert sum(sample.loss_mask) == member.sampled_tokens


@pytest.mark.parametrize(
    ("agent", "reason"), [("WithoutReward", "no_reward"), ("Raises", "agent_failed"), ("Killed", "agent_failed")]
)
def test_agent_error_is_its_rollouts_failure_reason(
    engine: tuple[str, str], tmp_path: Path, agent: str, reason: str
) -> None:
    (member,) = run_rollouts(agent, engine, tmp_path, count=1)
    assert (member.failure, member.turns) == (reason, 1)


@pytest.mark.sglang
@pytest.mark.skipif(
    not os.environ.get(SGLANG_PYTHON),
    reason=f"{SGLANG_PYTHON} does not name a Python with SGLang; scripts/sglang_cpu.sh sets one up",
)
def test_a_real_sglang_answers_the_agents_of_a_controller(tmp_path: Path) -> None:
    """Before and after it was given new weights."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "2+2?", "label": "4"}\n' * 4)
    flags = f"--runners controller --agent {_AGENTS}:TwoTurns --engine sglang --num-iterations 2 --eval-interval 0 "
    flags += "--rollout-batch-size 2 --n-samples-per-prompt 2 --max-new-tokens 24"
    given = ["--env-map", "QUESTION=input.question", "LABEL=input.label"]
    given += ["--tasks", str(tasks), "--model-path", str(LOOKUP_POLICY), "--output-dir", str(tmp_path / "run")]
    with train(*flags.split(), *given) as run:
        code, _ = run.end(280)
        assert code == 0, run.text[-4000:]
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(line["rollout/count"], line["rollout/failed"], line["trace/retokenized"]) for line in lines] == [
        (4, 0, 0),
        (4, 0, 0),
    ]
    for line in lines:
        assert line["train/tokens_trained"] == line["rollout/tokens_sampled"] > 0
        assert line["train/logprob_diff_max"] < 1e-4


def test_controllers_that_die_are_started_again_while_rollouts_succeed(engine: tuple[str, str], tmp_path: Path) -> None:
    """Twice, with one restart allowed: a rollout that succeeds gives it back. Each death costs what runs."""
    url, model = engine
    store = BridgeStore()
    succeeded: queue.SimpleQueue[str] = queue.SimpleQueue()
    store.subscribe_finished(lambda one: succeeded.put(one.rollout_id) if one.status == "succeeded" else None)
    sampling = {"temperature": 1.0, "max_new_tokens": 32}
    run_blocking(store.add_resources({"main_llm": LLM(endpoint=url, model=model, sampling_parameters=sampling)}))
    task = {"question": "2+2?", "label": "four"}
    ids = [run_blocking(store.enqueue_rollout(input=task, mode="train")).rollout_id for _ in range(24)]
    with pool_of("TwoTurns", store, tmp_path / "controller.log", max_processes=3, max_restarts=1) as pool:
        for _ in range(2):
            while not succeeded.empty():
                succeeded.get()
            succeeded.get(timeout=60)
            (controller,) = pool._supervisor.children.values()
            assert controller.pid is not None
            for child in psutil.Process(controller.pid).children():
                child.send_signal(signal.SIGKILL)
        ended = run_blocking(store.wait_for_rollouts(rollout_ids=ids, timeout=180))
        assert pool.failure is None
        assert len(ended) == 24
    assert all(rollout.status in FINISHED for rollout in ended)


def test_controller_that_dies_without_any_success_ends_the_run(engine: tuple[str, str], tmp_path: Path) -> None:
    store = BridgeStore()
    with pool_of("TwoTurns", store, tmp_path / "controller.log", max_restarts=1) as pool:
        deadline = time.monotonic() + 60
        while pool.failure is None and time.monotonic() < deadline:
            time.sleep(0.05)  # of another process: there is no event to wait for
            for controller in [*pool._supervisor.children.values()]:
                with suppress(psutil.Error):
                    for child in psutil.Process(controller.pid).children():
                        child.send_signal(signal.SIGKILL)
        # its last life ends after it was ready, or while it starts
        assert re.match(r"the controller (has ended|for \S+ ended with exit code -9)", str(pool.failure)), pool.failure


def test_controller_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
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


def test_a_python_without_a_controller_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not run as a Python"):
        check_python(tmp_path / "nowhere")


def test_without_a_key_this_machine_is_served_and_no_other(tmp_path: Path) -> None:
    with serving_api("four", key=None) as api:
        assert api.http.get("/api/rollouts?state_in=queuing").status_code == 200
    with pytest.raises(ConfigError, match="AGL_KEY"):
        ControllerSettings(agent="a:B", host="0.0.0.0")
