"""Episodes that the worker plays for a store: scores of judges and roles, splits, refusals."""

import asyncio
import io
import json
import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agl_slime.cli.local import run_training
from agl_slime.cli.main import main
from agl_slime.cli.settings import train_config
from agl_slime.errors import ConfigError
from agl_slime.runner.controller import ControllerPool
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_blocking
from agl_slime.tools.try_agent.command import try_task
from tests.environments.playing import answering_engine, in_order, load, on_path, play
from tests.harness.environments import ROOT, ask, env_python
from tests.harness.loop_thread import in_thread
from tests.programs.environments import quirks, tiny
from tests.programs.environments.evals import reply

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


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    on_path(tmp_path, monkeypatch)
    return quirks.write(tmp_path)


def test_program_sees_no_run_key_and_metric_keeps_its_rewards_name(name, tmp_path, monkeypatch):
    """With the key a program could post rewards, and rewards of single turns are trained."""
    monkeypatch.setenv("AGL_KEY", quirks.KEY)
    monkeypatch.setenv("AGL_ENV_MODEL_KEY", quirks.KEY)
    env = load(name)
    with in_thread(answering_engine(tmp_path / "model", lambda prompt: "four", {})) as engine:
        sampling = {"temperature": 1.0, "max_new_tokens": 32}
        llm = LLM(endpoint=engine.url, model=str(tmp_path / "model"), sampling_parameters=sampling)
        (member,) = play(env, env.tasks[:1], llm, tmp_path / "worker.log")

    assert member.failure is None, member.failure_message
    assert member.rewards["lines"] >= 1, "it reads the environment variables"
    assert member.rewards["keys"] == 0
    assert (member.reward, member.rewards["right"], member.rewards["metric/right"]) == (1.0, 1.0, 3.0)


def test_taskset_that_defaults_to_test_trains_on_its_train_split(name: str) -> None:
    env = load(name)
    assert {task["split"]: task["data_id"][:4] for task in env.tasks} == {"train": "trai"}
    assert {task["split"]: task["data_id"][:4] for task in env.val_tasks or ()} == {"eval": "test"}
    named = load(name, arguments=("--env.taskset.split", "test"), validate=False)
    assert {task["data_id"][:4] for task in named.tasks} == {"test"}, "a named split is taken"


def test_the_files_of_an_iteration_on_an_environment_agree(name, policy_dir, embedded_engine, tmp_path):
    config = train_config(
        env=name,
        env_python=Path(env_python()),
        model_path=policy_dir,
        sglang_url=embedded_engine,
        num_iterations=1,
        rollout_batch_size=2,
        n_samples_per_prompt=4,
        max_new_tokens=8,
        eval_interval=1,
        eval_rollouts=4,
        output_dir=tmp_path / "run",
    )
    out = io.StringIO()
    asyncio.run(run_training(config, console=Console(file=out, width=160)))

    assert "trained: equal" in out.getvalue()
    assert main(["audit", str(tmp_path / "run")]) == 0

    lines: list[str] = []
    for task in range(2):
        settings = {"model": tmp_path / "run", "sglang_url": embedded_engine, "write": lines.append}
        asyncio.run(try_task(None, task, **settings))
    page = "\n".join(lines)
    assert page.count("(test)") == 2, "the tasks that the run held out"
    assert page.count("reward: 1 (right 1, ") == 2


HERE = [f"--env.{role}.runtime.type" for role in ("agent", "assistant", "user")]
BY_ITSELF = ["--env.id", "user-sim", "--env.user.harness.id", "tiny_sums"]
GYM = ["agl_reasoning_gym", "--env.taskset.datasets"]
# name: --env, its arguments, vf-eval's own, episodes
CASES: dict[str, tuple[str, list[str], list[str], int]] = {
    "single agent": ("tiny_sums", [], ["tiny_sums"], 5),
    "best of n": ("tiny_sums", ["--env.id", "best-of-n", "--env.n", "2", HERE[0], "subprocess"], ["tiny_sums"], 5),
    "user": ("tiny_sums", [*BY_ITSELF, HERE[1], "subprocess", HERE[2], "subprocess"], ["tiny_sums"], 5),
    "chain_sum": ("reasoning-gym:chain_sum", [], [*GYM, '{"chain_sum": 1}'], 10),
    "primes": ("reasoning-gym:prime_factorization", [], [*GYM, '{"prime_factorization": 1}'], 10),
    "TicTacToe": ("textarena:TicTacToe-v0", [], ["agl_textarena", "--env.taskset.game", "TicTacToe-v0"], 6),
}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The episodes that `vf-eval` wrote, in the order of their tasks."""
    packages = tmp_path_factory.mktemp("packages")
    tiny.write(packages)
    with pytest.MonkeyPatch.context() as patch:
        on_path(packages, patch)
        cases = [[name, [*arguments, *shared], count] for name, (_, shared, arguments, count) in CASES.items()]
        by_case = ask("evals", str(packages), stdin=cases)
        yield {
            name: sorted(episodes, key=lambda episode: episode["task"]["data"]["idx"])
            for name, episodes in by_case.items()
        }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _expected(episode: dict[str, Any], trained: Sequence[str]) -> tuple[float, dict[str, float]]:
    """The rollout's reward, and rewards and metrics by name."""
    agents = {trace["agent"]["name"] for trace in episode["traces"]}
    named: dict[str, list[float]] = {}
    totals: dict[str, list[float]] = {}
    for trace in episode["traces"]:
        agent = trace["agent"]["name"]
        prefix = f"{agent}/" if len(agents) > 1 else ""
        scores = {name: score for name, score in trace["rewards"].items() if score is not None}
        if scores:
            total = sum(score["score"] * score["weight"] for score in scores.values())
            totals.setdefault(agent, []).append(total)
        for name, value in {**{name: score["score"] for name, score in scores.items()}, **trace["metrics"]}.items():
            named.setdefault(prefix + name, []).append(value)
    reward = _mean([_mean(values) for agent, values in totals.items() if agent in trained])
    return reward, {name: _mean(values) for name, values in named.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_run_scores_each_episode_as_vf_eval_does(evaluated: Any, case: str, tmp_path: Path) -> None:
    name, arguments, _, count = CASES[case]
    engine = answering_engine(tmp_path / "model", reply, {})
    env = load(name, arguments=arguments, validate=False, most_tasks=count)
    with in_thread(engine) as served:
        sampling = {"temperature": 1.0, "max_new_tokens": 200}
        llm = LLM(endpoint=served.url, model=str(tmp_path / "model"), sampling_parameters=sampling)
        members = play(env, in_order(env), llm, tmp_path / "worker.log")

    episodes = evaluated[case]
    assert len(episodes) == len(members) == count
    for episode, member in zip(episodes, members, strict=True):
        task = episode["task"]["data"]["name"]
        if not episode["ok"]:
            errors = [*(error for trace in episode["traces"] for error in trace["errors"]), *episode["errors"]]
            assert (member.failure, member.reward) == (f"environment_{errors[-1]['type']}", None), task
            continue
        assert member.failure is None, (task, member.failure_message)
        reward, named = _expected(episode, env.trained)
        assert (member.reward, dict(member.rewards)) == (reward, {**named, "reward": reward}), task
    failed = sum(member.failure is not None for member in members)
    assert (failed > 0) == (case not in ("chain_sum", "TicTacToe")), "some of these cannot be read, and have failed"
    assert len({member.reward for member in members}) > 1, "a model that is always right or wrong shows little"
