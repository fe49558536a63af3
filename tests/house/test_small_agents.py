"""Tasks of SmolLM2's size: a seed gives the same tasks, the right answer is worth 1, shortcuts of a policy less."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from agents.alphabet_sort import AlphabetSort
from agents.reverse_text import ReverseText
from agents.shop import Price, Shop
from agl_slime.cli.start import check_tools
from agl_slime.cli.wiring import RunInputs
from agl_slime.tokens.turn import Trajectory, Turn


class WithoutCalls:
    """A tokenizer whose template writes contents alone, as SmolLM2's: no parser can be chosen by it."""

    chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

    def apply_chat_template(self, conversation: Any, **_: Any) -> str:
        return "".join(message["content"] for message in conversation)


class ReverseCharacters(ReverseText):
    unit = "character"


def tasks(agent: Any, seed: int, n: int = 50) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [agent.make_task(rng) for _ in range(n)]


@pytest.mark.parametrize("agent", [AlphabetSort(), ReverseText(), ReverseCharacters(), Shop()])
def test_tasks_depend_on_the_seed_and_the_answer_is_worth_one(agent: Any) -> None:
    assert tasks(agent, 1) == tasks(agent, 1) != tasks(agent, 2)
    for task in tasks(agent, 1):
        assert json.loads(json.dumps(task)) == task
        message = agent.build_prompt(task)[-1]
        question = task.get("text", task.get("item", " ".join(task.get("words", ()))))
        assert message["role"] == "user"
        assert question in message["content"]
        assert task["label"] not in message["content"]
        if not isinstance(agent, Shop):
            assert agent.compute_reward(task, f" {task['label']}\n") == 1.0
            assert 0.0 <= agent.compute_reward(task, question) < 0.75
            assert agent.compute_reward(task, "") == agent.compute_reward(task, "???") == 0.0


def test_sorting_pays_for_exactly_the_words_of_the_task() -> None:
    task = {"words": ["lemon", "apple", "house"], "label": "apple house lemon"}
    answers = ("apple house lemon", "apple lemon house", "lemon apple house", "apple house", "apple house moon")
    rewards = [AlphabetSort().compute_reward(task, answer) for answer in answers]
    assert rewards == pytest.approx([1, 1 / 9, 0, 0, 0])


def test_the_shop_pays_for_asking_and_for_the_number() -> None:
    def reward(item: str | None, answer: str) -> float:
        """``item`` is None without a call of the tool."""
        call = f'<tool_call>{{"name": "price", "arguments": {{"item": "{item}"}}}}</tool_call>'
        texts = [answer] if item is None else [call, answer]
        turns = tuple(Turn(prompt_ids=[1], response_ids=[2], text=text) for text in texts)
        return asyncio.run(Shop().score(task, Trajectory(rollout_id="ro", attempt_id="at", task=task, turns=turns)))

    task = {"item": "rope", "label": "42"}
    assert reward("rope", "42") == reward("rope", "It costs 42 coins.") == 1.0
    assert reward("rope", "42 or 43") == pytest.approx(0.2)
    assert reward("ball", "42") == reward(None, "42") == 0.0
    assert Price(task)("Rope ") == "42 coins"
    inputs = RunInputs(agent=Shop(), tasks=[task])
    assert asyncio.run(check_tools(inputs, Path("smollm2"), WithoutCalls(), seed=0)) == ""
    assert "no such item" in Price(task)("ball")
