"""The same episodes through a run and through verifiers' own `vf-eval`, with one scripted model: scores, metrics and
failures are equal, episode by episode."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agl_slime.support.agl import LLM
from tests.environments.playing import answering_engine, in_order, load, on_path, play
from tests.harness.environments import ask
from tests.harness.loop_thread import in_thread
from tests.programs.environments import tiny
from tests.programs.environments.evals import reply

pytestmark = pytest.mark.environments

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
