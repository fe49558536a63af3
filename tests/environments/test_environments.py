"""Episodes that the worker plays for a store: scores of judges and roles, splits, refusals."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_slime.errors import ConfigError
from agl_slime.runner.controller import ControllerPool
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_blocking
from tests.environments.playing import answering_engine, in_order, load, on_path, play
from tests.harness.environments import ROOT, ask, env_python
from tests.harness.loop_thread import in_thread
from tests.programs.environments import tiny

pytestmark = pytest.mark.environments
Engine = tuple[dict[str, list[int]], LLM]
"""The sampled ids by prompt, and the address."""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "packages").mkdir()
    tiny.write(tmp_path / "packages")
    on_path(tmp_path / "packages", monkeypatch)
    return tmp_path / "packages"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """An engine that gives `tiny.answer`."""
    log: dict[str, list[int]] = {}

    def answer(prompt: str) -> str:
        assert prompt not in log, "a prompt came twice"
        return tiny.answer(prompt)

    with in_thread(answering_engine(tmp_path / "model", answer, log)) as served:
        sampling = {"temperature": 1.0, "max_new_tokens": 64}
        yield log, LLM(endpoint=served.url, model=str(tmp_path / "model"), sampling_parameters=sampling)


def test_a_worker_of_another_host_shares_the_run(packages, engine, tmp_path, monkeypatch):
    """Started by hand with the file that the run writes; the run's own worker has room for one episode."""
    monkeypatch.setenv("AGL_KEY", "a-key-of-the-run")
    env, store, log = load("tiny_sums", max_concurrent=1), BridgeStore(), tmp_path / "worker.log"
    run_blocking(store.add_resources({"main_llm": engine[1]}))
    plan = env.plan(log=log)
    spec = json.loads((tmp_path / "environment.json").read_text())
    (tmp_path / "spec.json").write_text(
        json.dumps({**spec, "max_concurrent": 8, "traces": str(tmp_path / "elsewhere")})
    )
    with ControllerPool(plan=plan, store=store) as pool, (tmp_path / "second.log").open("w") as second_log:
        url = f"{pool.gateway.url}/controller/second"
        spec_file = f"@{tmp_path / 'spec.json'}"
        command = [env_python(), "-m", "agl_slime.environments.worker", "work", "--spec", spec_file, "--url", url]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(packages), str(ROOT)))}
        polled, listed = threading.Event(), pool.gateway.rollouts.list

        async def noticed(*args: Any, controller: str) -> Any:
            if controller == "second":
                polled.set()
            return await listed(*args, controller=controller)

        monkeypatch.setattr(pool.gateway.rollouts, "list", noticed)
        second = subprocess.Popen(command, env=environment, stdout=second_log, stderr=second_log)
        try:
            assert polled.wait(100), (tmp_path / "second.log").read_text()
            tasks = [task for task in in_order(env)[:20] if task["idx"] % 5 != 3]
            ids = [run_blocking(store.enqueue_rollout(input=task, mode="train")).rollout_id for task in tasks]
            ended = run_blocking(store.wait_for_rollouts(rollout_ids=ids, timeout=200))
            assert len(ended) == len(ids), log.read_text()
        finally:
            second.terminate()
            second.wait(30)
    assert [rollout.status for rollout in ended] == ["succeeded"] * len(ids)
    assert 0 < len(list((tmp_path / "elsewhere").iterdir())) <= len(ids)


def test_a_judge_is_answered_by_the_policy_and_trained_only_if_named(packages: Path, engine: Engine, tmp_path: Path):
    episodes = ask("tiny", str(packages), "tiny_judged", "3")
    env = load("tiny_judged")
    assert (env.trained, env.untrained) == (["solver"], ["judge"])
    members = play(env, in_order(env)[:3], engine[1], tmp_path / "worker.log")
    for episode, member in zip(episodes, members, strict=True):
        assert member.failure is None
        assert member.reward == episode["traces"]["solver"]["reward"]
        assert member.turns == 2
        assert member.rewards["judge/fair"] == 0.25
        assert member.rewards["solver/judged"] == episode["traces"]["solver"]["rewards"]["judged"]
        (sample,) = (sample for sample in member.samples if any(sample.loss_mask))
        assert member.sampled_tokens > sum(sample.loss_mask)


def test_agents_that_are_both_trained_have_one_reward_each(packages: Path, engine: Engine, tmp_path: Path) -> None:
    env = load("tiny_judged", trained=("judge",))
    assert (env.trained, env.untrained) == (["solver", "judge"], [])
    (member,) = play(env, in_order(env)[:1], engine[1], tmp_path / "worker.log")
    assert {sample.reward for sample in member.samples} == {2.5, 0.25}


def digests(tasks: Any) -> set[str]:
    return {task["digest"] for task in tasks or ()}


def test_held_out_tasks_are_disjoint_and_depend_on_the_seed_only(packages: Path) -> None:
    first, same, second = (load("tiny_sums", seed=seed) for seed in (0, 0, 1))
    assert (first.tasks, first.val_tasks) == (same.tasks, same.val_tasks)
    assert first.val_tasks != second.val_tasks
    assert (len(first.tasks), first.held_out) == (18, 2)
    assert not digests(first.tasks) & digests(first.val_tasks)
    assert "2 held out" in first.summary


def test_taskset_with_an_eval_split_is_validated_on_it() -> None:
    env = load("reasoning-gym:chain_sum", arguments=("--env.taskset.size", "30"))
    assert {task["split"] for task in env.tasks} == {"train"}
    assert {task["split"] for task in env.val_tasks or ()} == {"eval"}
    assert not digests(env.tasks) & digests(env.val_tasks)
    assert (env.held_out, len(env.tasks)) == (0, 30)


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("no_such_taskset", {}, "no_such_taskset"),
        ("tiny_plain", {}, "--env.agent.runtime.type"),
        ("tiny_sums", {"untrained": ("agent",)}, "none of its agents"),
        ("tiny_sums", {"trained": ("judge",)}, "the agents of tiny_sums are agent"),
        ("tiny_sums", {"arguments": ("--env.agent.retries.max-retries", "2")}, "--group-max-retries"),
        ("tiny_sums", {"models": ("agent=nowhere",)}, "ROLE=URL"),
    ],
)
def test_invalid_environment_settings_are_an_error_in_one_sentence(packages, name, settings, sentence):
    with pytest.raises(ConfigError, match=sentence) as refused:
        load(name, **settings)
    assert "Traceback" not in str(refused.value)
