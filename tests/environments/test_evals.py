"""The same episodes through a run and through verifiers' own `vf-eval`, with one scripted model: scores, metrics and
failures are equal, episode by episode."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agl_slime.environments.environment import load_environment
from agl_slime.support.agl import LLM
from tests.environments.test_environments import in_order, play
from tests.harness.environments import ask, env_python
from tests.harness.gateway import TEMPLATE
from tests.harness.loop_thread import in_thread
from tests.harness.scripted_engine import ScriptedEngine
from tests.harness.tokenizers import small_tokenizer
from tests.programs.environments import tiny
from tests.programs.environments.evals import said

pytestmark = pytest.mark.environments

HERE = [f"--env.{role}.runtime.type" for role in ("agent", "assistant", "user")]
BY_ITSELF = ["--env.id", "user-sim", "--env.user.harness.id", "tiny_sums"]
# name: --env, its arguments, vf-eval's own, episodes
CASES: dict[str, tuple[str, list[str], list[str], int]] = {
    "single agent": ("tiny_sums", [], ["tiny_sums"], 5),
    "best of n": ("tiny_sums", ["--env.id", "best-of-n", "--env.n", "2", HERE[0], "subprocess"], ["tiny_sums"], 5),
    "user": ("tiny_sums", [*BY_ITSELF, HERE[1], "subprocess", HERE[2], "subprocess"], ["tiny_sums"], 5),
    "chain_sum": (
        "reasoning-gym:chain_sum",
        [],
        ["agl_reasoning_gym", "--env.taskset.datasets", '{"chain_sum": 1}'],
        10,
    ),
    "prime_factorization": (
        "reasoning-gym:prime_factorization",
        [],
        ["agl_reasoning_gym", "--env.taskset.datasets", '{"prime_factorization": 1}'],
        10,
    ),
    "TicTacToe": ("textarena:TicTacToe-v0", [], ["agl_textarena", "--env.taskset.game", "TicTacToe-v0"], 6),
}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `vf-eval` wrote of each episode, in the order of their tasks."""
    packages = tmp_path_factory.mktemp("packages")
    tiny.write(packages)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join((str(packages), os.environ.get("PYTHONPATH", ""))))
        wanted = [[name, [*own, *arguments], count] for name, (_, arguments, own, count) in CASES.items()]
        found = ask("evals", str(packages), stdin=wanted)
        yield {name: sorted(some, key=lambda one: one["task"]["data"]["idx"]) for name, some in found.items()}


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
        scores = {name: one for name, one in trace["rewards"].items() if one is not None}
        if scores:
            totals.setdefault(agent, []).append(sum(one["score"] * one["weight"] for one in scores.values()))
        for name, value in {**{name: one["score"] for name, one in scores.items()}, **trace["metrics"]}.items():
            named.setdefault(prefix + name, []).append(value)
    reward = _mean([_mean(values) for agent, values in totals.items() if agent in trained])
    return reward, {name: _mean(values) for name, values in named.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_run_scores_each_episode_as_vf_eval_does(evaluated: Any, case: str, tmp_path: Path) -> None:
    name, arguments, _, count = CASES[case]
    own = evaluated[case]
    tokenizer: Any = small_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "model")
    begun: dict[tuple[int, ...], tuple[list[int], int]] = {}

    def next_id(ids: Sequence[int]) -> int:
        says, at = begun.pop(tuple(ids), ([], 0))
        if not says:
            text = tokenizer.encode(said(tokenizer.decode(list(ids))), add_special_tokens=False)
            says = [*text, tokenizer.eos_token_id]
        begun[(*ids, says[at])] = (says, at + 1)
        return says[at]

    engine = ScriptedEngine(
        vocab_size=len(tokenizer),
        eos_id=tokenizer.eos_token_id,
        decode=lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False),
        next_id=next_id,
    )
    env = load_environment(name, python=env_python(), arguments=arguments, validate=False, most_tasks=count)
    with in_thread(engine) as served:
        sampling = {"temperature": 1.0, "max_new_tokens": 200}
        llm = LLM(endpoint=served.url, model=str(tmp_path / "model"), sampling_parameters=sampling)
        members = play(env, in_order(env), llm, tmp_path / "worker.log")

    assert len(own) == len(members) == count
    for episode, member in zip(own, members, strict=True):
        which = episode["task"]["data"]["name"]
        if not episode["ok"]:
            errors = [*(error for trace in episode["traces"] for error in trace["errors"]), *episode["errors"]]
            assert (member.failure, member.reward) == (f"environment_{errors[-1]['type']}", None), which
            continue
        assert member.failure is None, (which, member.failure_message)
        reward, named = _expected(episode, env.trained)
        assert (member.reward, dict(member.rewards)) == (reward, {**named, "reward": reward}), which
    failed = sum(member.failure is not None for member in members)
    assert (failed > 0) == (case not in ("chain_sum", "TicTacToe")), "some of these cannot be read, and have failed"
    assert len({member.reward for member in members}) > 1, "a model that is always right or wrong shows little"
