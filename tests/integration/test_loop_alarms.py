"""The loop warns of agents that learn nothing although nothing fails."""

from __future__ import annotations

from typing import Any

from agl_slime.report import Warning
from tests.loop_cases import HelloAgent, LoopCase, hello_engine


def lookup(key: str) -> str:
    """Look a key up.

    Args:
        key: what to look up.
    """
    return key


class NeverCalls(HelloAgent):
    """Is offered a tool; the engine, which only ever says hello, does not call it."""

    tools = [lookup]
    tools_in_prompt = False
    tool_parser = "hermes"
    max_turns = 2


def warnings_of(agent: Any, **settings: Any) -> list[str]:
    with hello_engine() as engine, LoopCase(agent=agent, url=engine.url, **settings) as case:
        case.loop.run()
        return [warning.text for warning in case.recorder.of(Warning)]


def test_a_tool_that_nobody_calls_is_named() -> None:
    texts = warnings_of(NeverCalls(), rollout_batch_size=8, n_samples_per_prompt=4)
    assert [text for text in texts if text.startswith("tool 'lookup' was never called in 32 rollouts")]


def test_answers_that_are_all_alike_are_told_unless_they_earn_the_best_reward() -> None:
    # the scripted engine says the same to everybody; only Ada's group earns the best reward there is
    texts = warnings_of(HelloAgent(judge=lambda task, response: float(task["name"] == "Ada")), rollout_batch_size=8)
    assert [text for text in texts if "all answers are the same to the token" in text]
    assert not warnings_of(HelloAgent(), rollout_batch_size=8)
