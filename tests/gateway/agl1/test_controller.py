"""The unmodified controller of Agent Lightning 1.x runs a store's rollouts: as a child process, or started by hand."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from agl_slime.data.read import read_rollout
from agl_slime.gateway.agl1.settings import PYTHON_VARIABLE, ControllerSettings
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.controller import ControllerPool
from agl_slime.runner.controller_process import ControllerProcess, agents_of
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_blocking
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
NEEDS_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="needs agl-slime[local]")
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
    return [run_blocking(read_rollout(store, rollout_id)) for rollout_id in ids]


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
def test_agent_error_is_its_rollouts_failure_reason(store: BridgeStore, tmp_path: Path, agent: str, reason: str):
    (member,) = run_rollouts(agent, store, tmp_path / "controller.log", count=1)
    assert (member.failure, member.turns) == (reason, 1)


def test_controller_that_dies_without_any_success_ends_the_run(store: BridgeStore, tmp_path: Path) -> None:
    with child_pool("TwoTurns", store, tmp_path / "controller.log", max_restarts=1) as pool:
        deadline = time.monotonic() + 60
        while pool.failure is None and time.monotonic() < deadline:
            time.sleep(0.05)  # no event announces a start of another process
            kill_controllers(pool)
        # the last process ends after it was ready, or while it starts
        assert re.match(r"the controller (for \S+ )?has ended: killed by signal 9, ", str(pool.failure)), pool.failure


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
        members: list[Any] = [run_blocking(read_rollout(store, rollout_id)) for rollout_id in ids]
        workers = {run_blocking(store.get_latest_attempt(rollout_id)).worker_id for rollout_id in ids}  # type: ignore[union-attr]
    assert [(member.failure, member.reward, member.turns) for member in members] == [(None, 1.0, 2)] * len(ids)
    assert workers == {"agl-controller/a", "agl-controller/b"}


@NEEDS_TORCH
@pytest.mark.parametrize(
    ("rollouts", "kills", "train_kills", "outside"), [(40, 4, 0, False), (64, 0, 2, False), (64, 0, 2, True)]
)
def test_killed_controllers_agents_and_runs_lose_and_repeat_no_rollout(tmp_path, rollouts, kills, train_kills, outside):
    """``outside``: the controller was started by hand and outlives the run; agents that it runs then are of no
    rollout."""
    from tests.programs.kill_controller import run

    options: dict[str, Any] = {"batch": 8 if train_kills else 2, "train_kills": train_kills, "outside": outside}
    result = run(tmp_path, rollouts=rollouts, kills=kills, seed=2, limit_s=600, **options)
    assert result.wrong == []
    assert sum(result.kills.values()) == kills + train_kills
    assert result.trained > 0
