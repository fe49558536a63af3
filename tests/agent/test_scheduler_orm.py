"""Reward functions in the form of ms-swift's ORMs, on agents with and without a scheduler."""

from __future__ import annotations

import re
from typing import Any

import pytest

from agl_slime import SGLangLitAgent
from agl_slime.agent.orm import ORM, AsyncORM, orms
from agl_slime.agent.scheduler import MultiTurnScheduler
from tests.harness.conversations import ScriptedClient
from tests.harness.rollouts import Finished, run_rollout
from tests.harness.vocabularies import chat_tokenizer

TASK = {"prompt": "6 times 4?", "problem": "6 * 4", "solution": "24"}
seen: list[tuple[list[str], dict[str, Any]]] = []


class Accuracy(ORM):
    def __call__(self, completions: list[str], **kwargs: Any) -> list[Any]:
        seen.append((completions, kwargs))
        return [float(wanted in text) for text, wanted in zip(completions, kwargs["solution"], strict=True)]


class Short(AsyncORM):
    async def __call__(self, completions: list[str], **kwargs: Any) -> list[Any]:
        return [0.25 if len(text) < 10 else None for text in completions]


def rounds(completions: list[str], messages: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(messages[0]))]


class Again(MultiTurnScheduler):
    def step(self, infer_request: Any, result: Any, current_turn: int) -> dict[str, Any]:
        infer_request.messages.append({"role": "user", "content": "Sure?"})
        return {"infer_request": infer_request, "rollout_infos": {"asked_again": current_turn}}


async def rewarded(*functions: Any, answers: tuple[str, ...] = ("12.", "24."), turns: int = 2) -> Finished:
    tokenizer = chat_tokenizer("anthropic", "chatml")
    agent = SGLangLitAgent(tokenizer=tokenizer, client=ScriptedClient(tokenizer, answers))
    agent.scheduler, agent.reward_functions = Again(max_turns=turns), functions
    return await run_rollout(agent, TASK)


async def test_a_function_gets_the_last_answer_the_columns_and_the_conversation() -> None:
    seen.clear()
    finished = await rewarded(Accuracy)
    (sample,) = finished.convert(chat_tokenizer("anthropic", "chatml")).samples
    assert sample.reward == 1.0
    ((completions, columns),) = seen
    assert completions == ["24."]
    assert {"problem", "solution", "messages", "is_truncated"} <= columns.keys()
    assert (columns["solution"], columns["is_truncated"]) == (["24"], [True])  # max_turns ended it
    assert columns["rollout_infos"] == [{"asked_again": 1}]
    assert [message["content"] for message in columns["messages"][0]] == ["6 times 4?", "12.", "Sure?", "24."]


async def test_several_reward_functions_are_summed_and_named() -> None:
    orms["by name"] = Accuracy
    try:
        finished = await rewarded("by name", Short, rounds)
    finally:
        del orms["by name"]
    trajectory = finished.convert(chat_tokenizer("anthropic", "chatml")).trajectory
    assert trajectory.rewards == {"reward": 5.25, "by name": 1.0, "Short": 0.25, "rounds": 4.0}
    assert trajectory.reward == 5.25


async def test_a_function_that_does_not_apply_has_no_part_in_the_sum() -> None:
    finished = await rewarded(Accuracy, Short, answers=("It is perhaps 24.",), turns=1)
    assert finished.convert(chat_tokenizer("anthropic", "chatml")).trajectory.rewards == {
        "reward": 1.0,
        "Accuracy": 1.0,
    }


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda completions, **_: 1.0, r"returned 1\.0; expected a list with one number"),
        (lambda completions, **_: [None], "returned None"),
        ("unheard", "there is no reward function 'unheard'"),
    ],
)
async def test_reward_function_without_a_reward_fails_the_rollout_by_name(function: Any, sentence: str) -> None:
    assert re.search(sentence, str((await rewarded(function)).failure))
