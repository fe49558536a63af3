"""A run warns of agents that learn nothing although nothing fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agl_slime.loop.settings import LoopState
from agl_slime.report.files import RunDir
from agl_slime.report.rollouts import RolloutWriter
from tests.harness.loop import HelloAgent, LoopCase, hello_engine


def lookup(key: str) -> str:
    """Look a key up.

    Args:
        key: The key.
    """
    return key


class NeverCalls(HelloAgent):
    """Offers a tool that the engine, which only says hello, does not call."""

    tools = [lookup]
    tools_in_prompt = False
    tool_parser = "hermes"
    max_turns = 2


def warnings_of(path: Path, agent: Any, **settings: Any) -> list[str]:
    texts: list[str] = []
    writer = RolloutWriter(RunDir(path), warn=lambda text, key: texts.append(text))
    with hello_engine() as engine, LoopCase(agent=agent, url=engine.url, on_event=writer.handle, **settings) as case:
        case.loop.run()
    writer.close()
    return texts


def test_uncalled_tool_raises_an_alarm(tmp_path: Path) -> None:
    texts = warnings_of(tmp_path, NeverCalls(), rollout_batch_size=8, n_samples_per_prompt=4)
    assert [text for text in texts if text.startswith("tool 'lookup' was never called in 32 rollouts")]


def test_identical_answers_raise_an_alarm_unless_all_earn_the_best_reward(tmp_path: Path) -> None:
    # the scripted engine has one answer; only Ada's group earns the best reward
    only_ada = HelloAgent(judge=lambda task, response: float(task["name"] == "Ada"))
    texts = warnings_of(tmp_path / "a", only_ada, rollout_batch_size=8)
    assert [text for text in texts if "all answers are token-identical" in text]
    assert not warnings_of(tmp_path / "b", HelloAgent(), rollout_batch_size=8)


def test_resumed_run_knows_the_earlier_best_reward(tmp_path: Path) -> None:
    half = HelloAgent(judge=lambda task, response: 0.5)
    assert not warnings_of(tmp_path, HelloAgent(), rollout_batch_size=8)
    start = LoopState(iteration=2, reward_means=(1.0, 1.0))
    texts = warnings_of(tmp_path, half, rollout_batch_size=8, num_iterations=3, start=start)
    assert [text for text in texts if "all answers are token-identical" in text]
    assert not warnings_of(tmp_path / "new", half, rollout_batch_size=8)
