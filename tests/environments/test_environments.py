"""Episodes that the worker plays for a store: scores are verifiers' own, tokens the engine's."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agl_slime.data.read import collect
from agl_slime.data.results import MemberResult
from agl_slime.environments.environment import Environment, load_environment
from agl_slime.errors import ConfigError
from agl_slime.runner.controller import ControllerPool
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM
from agl_slime.support.threads import run_blocking
from tests.harness.environments import ROOT, ask, env_python
from tests.harness.gateway import TEMPLATE
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer
from tests.programs.environments import tiny

pytestmark = pytest.mark.environments


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "packages").mkdir()
    tiny.write(tmp_path / "packages")
    known = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path / "packages"), known)))
    return tmp_path / "packages"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[dict[str, list[int]], LLM]]:
    """Says what `tiny.answer` does, with a log of what it sampled for which prompt."""
    log: dict[str, list[int]] = {}
    tokenizer = small_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "model")
    scripted = ScriptedEngine(
        vocab_size=len(tokenizer),
        eos_id=tokenizer.eos_token_id,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
        next_id=_answering(tokenizer, log),
    )
    with in_thread(scripted) as served:
        sampling = {"temperature": 1.0, "max_new_tokens": 64}
        yield log, LLM(endpoint=served.url, model=str(tmp_path / "model"), sampling_parameters=sampling)


def _answering(tokenizer: Any, log: dict[str, list[int]]) -> Callable[[Sequence[int]], int]:
    begun: dict[tuple[int, ...], tuple[list[int], int]] = {}

    def next_id(ids: Sequence[int]) -> int:
        said, at = begun.pop(tuple(ids), (None, 0))
        if said is None:
            prompt = tokenizer.decode(list(ids))
            assert prompt not in log, "asked twice"
            text = tokenizer.encode(tiny.answer(prompt), add_special_tokens=False)
            said = log[prompt] = [*text, tokenizer.eos_token_id]
        begun[(*ids, said[at])] = (said, at + 1)
        return said[at]

    return next_id


def load(name: str, **settings: Any) -> Environment:
    return load_environment(name, python=env_python(), **settings)


def play(env: Environment, tasks: Sequence[dict[str, Any]], llm: LLM, log: Path) -> list[MemberResult]:
    store = BridgeStore()
    run_blocking(store.add_resources({"main_llm": llm}))
    ids = [run_blocking(store.enqueue_rollout(input=task, mode="train")).rollout_id for task in tasks]
    with ControllerPool(plan=env.plan(log=log), store=store):
        ended = run_blocking(store.wait_for_rollouts(rollout_ids=ids, timeout=200))
        assert len(ended) == len(ids), log.read_text()
    return [run_blocking(collect(store, rollout_id)) for rollout_id in ids]


def in_order(env: Environment) -> list[dict[str, Any]]:
    return sorted([*env.tasks, *(env.val_tasks or ())], key=lambda task: task["idx"])


def test_scores_equal_verifiers_and_each_sampled_token_is_trained_once(
    packages: Path, engine: tuple[dict[str, list[int]], LLM], tmp_path: Path
) -> None:
    wanted = ask("tiny", str(packages), "tiny_sums", "10")
    env = load("tiny_sums")
    members = play(env, in_order(env)[:10], engine[1], tmp_path / "worker.log")

    for number, (own, member) in enumerate(zip(wanted, members, strict=True)):
        assert own["ok"] == (number % 5 != 3)
        if not own["ok"]:
            assert (member.failure, member.reward) == (f"environment_{own['errors'][-1]}", None)
            assert "cannot read that" in (member.failure_message or "")
            continue
        agent = own["traces"]["agent"]
        assert member.reward == agent["reward"]
        assert dict(member.rewards) == {"reward": agent["reward"], **agent["rewards"], **agent["metrics"]}
        trained = [id_ for sample in member.samples for id_ in _trained(sample)]
        (sampled,) = (ids for prompt, ids in engine[0].items() if f"What is {number} + 1" in prompt)
        assert trained == sampled
    rewards = [member.reward for member in members[:5]]
    assert rewards == [1.5, 0.5, 0.5, None, 1.0]


def _trained(sample: Any) -> list[int]:
    response = sample.tokens[-sample.response_length :]
    return [id_ for id_, mask in zip(response, sample.loss_mask, strict=True) if mask]


def test_a_worker_of_another_host_shares_the_run(
    packages: Path, engine: tuple[dict[str, list[int]], LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started by hand with the file that the run writes; the run's own worker has room for one episode."""
    monkeypatch.setenv("AGL_KEY", "a-key-of-the-run")
    env, store, log = load("tiny_sums", max_concurrent=1), BridgeStore(), tmp_path / "worker.log"
    run_blocking(store.add_resources({"main_llm": engine[1]}))
    plan = env.plan(log=log)
    spec = json.loads((tmp_path / "environment.json").read_text())
    (tmp_path / "spec.json").write_text(
        json.dumps({**spec, "max_concurrent": 8, "traces": str(tmp_path / "elsewhere")})
    )
    with ControllerPool(plan=plan, store=store) as pool, (tmp_path / "other.log").open("w") as other_log:
        url = f"{pool.gateway.url}/controller/other"
        spec_file = f"@{tmp_path / 'spec.json'}"
        command = [env_python(), "-m", "agl_slime.environments.worker", "work", "--spec", spec_file, "--url", url]
        beside = {**os.environ, "PYTHONPATH": os.pathsep.join((str(packages), str(ROOT)))}
        other_asks, listed = threading.Event(), pool.gateway.rollouts.list

        async def noticed(*args: Any, controller: str) -> Any:
            if controller == "other":
                other_asks.set()
            return await listed(*args, controller=controller)

        monkeypatch.setattr(pool.gateway.rollouts, "list", noticed)
        other = subprocess.Popen(command, env=beside, stdout=other_log, stderr=other_log)
        try:
            assert other_asks.wait(100), (tmp_path / "other.log").read_text()
            tasks = [task for task in in_order(env)[:20] if task["idx"] % 5 != 3]
            ids = [run_blocking(store.enqueue_rollout(input=task, mode="train")).rollout_id for task in tasks]
            ended = run_blocking(store.wait_for_rollouts(rollout_ids=ids, timeout=200))
            assert len(ended) == len(ids), log.read_text()
        finally:
            other.terminate()
            other.wait(30)
    assert [rollout.status for rollout in ended] == ["succeeded"] * len(ids)
    elsewhere = list((tmp_path / "elsewhere").iterdir())
    assert 0 < len(elsewhere) <= len(ids)


def test_a_judge_is_answered_by_the_policy_and_not_trained(
    packages: Path, engine: tuple[dict[str, list[int]], LLM], tmp_path: Path
) -> None:
    wanted = ask("tiny", str(packages), "tiny_judged", "3")
    env = load("tiny_judged")
    assert (env.trained, env.untrained) == (["solver"], ["judge"])
    for own, member in zip(wanted, play(env, in_order(env)[:3], engine[1], tmp_path / "worker.log"), strict=True):
        assert member.failure is None
        assert member.reward == own["traces"]["solver"]["reward"]
        assert member.turns == 2
        assert member.rewards["judge/fair"] == 0.25
        assert member.rewards["solver/judged"] == own["traces"]["solver"]["rewards"]["judged"]
        (sample,) = (one for one in member.samples if any(one.loss_mask))
        assert member.sampled_tokens > sum(sample.loss_mask)


def test_agents_that_are_both_trained_have_rewards_of_their_own(
    packages: Path, engine: tuple[dict[str, list[int]], LLM], tmp_path: Path
) -> None:
    env = load("tiny_judged", trained=("judge",))
    assert (env.trained, env.untrained) == (["solver", "judge"], [])
    (member,) = play(env, in_order(env)[:1], engine[1], tmp_path / "worker.log")
    rewards = {one.reward for one in member.samples}
    assert rewards == {2.5, 0.25}


def test_held_out_tasks_are_disjoint_and_depend_on_the_seed_only(packages: Path) -> None:
    first, again, other = (load("tiny_sums", seed=seed) for seed in (0, 0, 1))
    assert (first.tasks, first.val_tasks) == (again.tasks, again.val_tasks)
    assert first.val_tasks != other.val_tasks
    digests = {task["digest"] for task in first.tasks}
    assert (len(first.tasks), first.held_out) == (18, 2)
    assert not digests & {task["digest"] for task in first.val_tasks or ()}
    assert "2 held out" in first.summary


def test_taskset_with_an_eval_split_is_validated_on_it() -> None:
    env = load("reasoning-gym:chain_sum", arguments=("--env.taskset.size", "30"))
    assert {task["split"] for task in env.tasks} == {"train"}
    assert {task["split"] for task in env.val_tasks or ()} == {"eval"}
    assert not {one["digest"] for one in env.tasks} & {one["digest"] for one in env.val_tasks or ()}
    assert (env.held_out, len(env.tasks)) == (0, 30)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("no_such_taskset", {}, "no_such_taskset"),
        ("tiny_plain", {}, "--env.agent.runtime.type"),
        ("tiny_sums", {"untrained": ("agent",)}, "none of its agents"),
        ("tiny_sums", {"trained": ("judge",)}, "the agents of tiny_sums are agent"),
        ("tiny_sums", {"arguments": ("--env.agent.retries.max-retries", "2")}, "--group-max-retries"),
        ("tiny_sums", {"models": ("agent=nowhere",)}, "ROLE=URL"),
    ],
)
def test_invalid_environment_settings_are_an_error_in_one_sentence(
    packages: Path, name: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        load(name, **settings)
    assert "Traceback" not in str(refused.value)
