"""Reward functions in the form of ms-swift's ORMs, on agents with and without a scheduler."""

from __future__ import annotations

import re
from typing import Any

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.agent.orm import ORM, AsyncORM, orms
from agl_slime.agent.scheduler import MultiTurnScheduler
from tests.agent.multi_turn_agents import Played, rollout

TASK = {"prompt": "6 times 4?", "problem": "6 * 4", "solution": "24"}
calls: list[tuple[list[str], dict[str, Any]]] = []


class Accuracy(ORM):
    def __call__(self, completions: list[str], **kwargs: Any) -> list[Any]:
        calls.append((completions, kwargs))
        return [float(solution in text) for text, solution in zip(completions, kwargs["solution"], strict=True)]


class Short(AsyncORM):
    async def __call__(self, completions: list[str], **kwargs: Any) -> list[Any]:
        return [0.25 if len(text) < 10 else None for text in completions]


def rounds(completions: list[str], messages: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(messages[0]))]


class Repeat(MultiTurnScheduler):
    def step(self, infer_request: Any, result: Any, current_turn: int) -> dict[str, Any]:
        infer_request.messages.append({"role": "user", "content": "Sure?"})
        return {"infer_request": infer_request, "rollout_infos": {"repeated": current_turn}}


async def rewarded(*functions: Any, answers: tuple[str, ...] = ("12.", "24."), turns: int = 2) -> Played:
    return await rollout(
        SGLangLitAgent,
        answers,
        "chatml",
        task=TASK,
        scheduler=Repeat(max_turns=turns),
        reward_functions=functions,
    )


async def test_a_function_gets_the_last_answer_the_columns_and_the_conversation() -> None:
    calls.clear()
    assert (await rewarded(Accuracy)).sample.reward == 1.0
    ((completions, columns),) = calls
    assert completions == ["24."]
    assert {"problem", "solution", "messages", "is_truncated"} <= columns.keys()
    assert (columns["solution"], columns["is_truncated"]) == (["24"], [True])  # max_turns ended it
    assert columns["rollout_infos"] == [{"repeated": 1}]
    assert [message["content"] for message in columns["messages"][0]] == ["6 times 4?", "12.", "Sure?", "24."]


async def test_several_reward_functions_are_summed_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that gives no number for an answer has no part in the sum."""
    monkeypatch.setitem(orms, "by name", Accuracy)
    trajectory = (await rewarded("by name", Short, rounds)).conversion.trajectory
    assert trajectory.rewards == {"reward": 5.25, "by name": 1.0, "Short": 0.25, "rounds": 4.0}
    assert trajectory.reward == 5.25
    played = await rewarded(Accuracy, Short, answers=("It is perhaps 24.",), turns=1)
    assert played.conversion.trajectory.rewards == {"reward": 1.0, "Accuracy": 1.0}


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda completions, **_: 1.0, r"returned 1\.0; expected a list with one number"),
        (lambda completions, **_: [None], "returned None"),
        ("unheard", "there is no reward function 'unheard'"),
    ],
)
async def test_reward_function_without_a_reward_fails_the_rollout_by_name(function: Any, sentence: str) -> None:
    assert re.search(sentence, (await rewarded(function)).failure)
