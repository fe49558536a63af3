"""The tasks of SmolLM2's size: a seed gives the same tasks again, the right answer is worth 1, and what a policy learns
in its place is worth less."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from agents.alphabet_sort import AlphabetSort
from agents.reverse_text import ReverseText
from agents.shop import Price, Shop
from agl_slime.tokens.trajectory import Trajectory
from agl_slime.tokens.turn import Turn


class ReverseCharacters(ReverseText):
    unit = "character"


def tasks(agent: Any, seed: int, n: int = 50) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [agent.make_task(rng) for _ in range(n)]


@pytest.mark.parametrize("agent", [AlphabetSort(), ReverseText(), ReverseCharacters(), Shop()])
def test_tasks_depend_on_the_seed_and_prompts_contain_them(agent: Any) -> None:
    assert tasks(agent, 1) == tasks(agent, 1) != tasks(agent, 2)
    for task in tasks(agent, 1):
        assert json.loads(json.dumps(task)) == task
        asked = agent.build_prompt(task)[-1]
        assert asked["role"] == "user"
        assert task.get("text", task.get("item", " ".join(task.get("words", ())))) in asked["content"]
        assert task["label"] not in asked["content"]  # the question is not the answer


@pytest.mark.parametrize("agent", [AlphabetSort(), ReverseText(), ReverseCharacters()])
def test_the_answer_is_worth_one_and_a_copy_of_the_question_less(agent: Any) -> None:
    for task in tasks(agent, 3):
        question = task.get("text") or " ".join(task["words"])
        assert agent.compute_reward(task, f" {task['label']}\n") == 1.0
        assert 0.0 <= agent.compute_reward(task, question) < 0.75
        assert agent.compute_reward(task, "") == agent.compute_reward(task, "???") == 0.0


def test_sorting_pays_for_exactly_the_words_that_were_asked() -> None:
    task = {"words": ["lemon", "apple", "house"], "label": "apple house lemon"}
    rewards = {
        answer: AlphabetSort().compute_reward(task, answer)
        for answer in ("apple house lemon", "apple lemon house", "lemon apple house", "apple house", "apple house moon")
    }
    assert list(rewards.values()) == pytest.approx([1, 1 / 9, 0, 0, 0])


@pytest.mark.parametrize(
    ("first", "last", "reward"),
    [
        ('<tool_call>{"name": "price", "arguments": {"item": "rope"}}</tool_call>', "42", 1.0),
        ('<tool_call>{"name": "price", "arguments": {"item": "rope"}}</tool_call>', "It costs 42 coins.", 1.0),
        ('<tool_call>{"name": "price", "arguments": {"item": "rope"}}</tool_call>', "41", 0.2),
        ('<tool_call>{"name": "price", "arguments": {"item": "rope"}}</tool_call>', "42 or 43", 0.2),
        ('<tool_call>{"name": "price", "arguments": {"item": "ball"}}</tool_call>', "42", 0.0),
        (None, "42", 0.0),  # guessed, without the tool
    ],
)
def test_the_shop_pays_for_asking_and_for_the_number(first: str | None, last: str, reward: float) -> None:
    turns = [Turn(prompt_ids=[1], response_ids=[2], text=text) for text in (first, last) if text is not None]
    task = {"item": "rope", "label": "42"}
    told = Trajectory(rollout_id="ro", attempt_id="at", task=task, turns=tuple(turns))
    assert asyncio.run(Shop().score(task, told)) == pytest.approx(reward)
    assert Price(task)("Rope ") == "42 coins"
    assert "no such item" in Price(task)("ball")
