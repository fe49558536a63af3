"""The tools and the reward, without a model: ``python -m pytest test_agent.py``."""

from __future__ import annotations

import random
from types import SimpleNamespace

from agent import MyAgent


def test_the_tools_lead_to_the_answer() -> None:
    agent = MyAgent()
    task = agent.make_task(random.Random(0))
    find, count = agent.build_tools(task)
    assert count(find(task["item"])) == task["stock"]
    assert find("no such item") == "not found"


def test_a_right_answer_earns_more_than_a_found_shelf() -> None:
    agent = MyAgent()
    task = agent.make_task(random.Random(0))
    find, _ = agent.build_tools(task)
    tools = {"find": find}
    assert agent.score(task, SimpleNamespace(response=task["stock"], tools=tools))["reward"] == 0.8
    find(task["item"])
    assert agent.score(task, SimpleNamespace(response="I do not know.", tools=tools))["reward"] == 0.2
    assert agent.score(task, SimpleNamespace(response=task["stock"], tools=tools))["reward"] == 1.0
