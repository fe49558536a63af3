"""An agent with two tools: ``find`` returns the shelf of an item, ``count`` the number of items on it; the answer is
that number.

Replace the tools, the prompt and the reward by your own. With a model that can already use tools you need no
``Demonstrations`` and no ``tools_in_prompt``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from agl_slime import SGLangLitAgent

LETTERS, DIGITS = "bdfgkmptvz", "123456789"


class Warehouse:
    """The tools of one rollout."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task = task
        self.shelf_found = False

    def find(self, item: str) -> str:
        """Find the shelf of an item.

        Args:
            item: The item's name.
        """
        self.shelf_found = item == self.task["item"]
        return self.task["shelf"] if self.shelf_found else "not found"

    def count(self, shelf: str) -> str:
        """Count the items on a shelf.

        Args:
            shelf: The shelf's name.
        """
        return self.task["stock"] if shelf == self.task["shelf"] else "not found"


class MyAgent(SGLangLitAgent):
    max_turns = 3
    tools_in_prompt = False  # the tiny policy knows the calls from its demonstrations; True for any other model

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        """A new task; ``--tasks FILE.jsonl`` takes tasks from a file instead."""
        return {
            "item": "".join(rng.sample(LETTERS, 2)),
            "shelf": "".join(rng.sample(DIGITS, 2)),
            "stock": "".join(rng.sample(DIGITS, 2)),
        }

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {"role": "system", "content": "Find the shelf, count what it holds, then answer with the number."},
            {"role": "user", "content": f'How many "{task["item"]}" are in stock?'},
        ]

    def build_tools(self, task: dict[str, Any]) -> Sequence[Any]:
        warehouse = Warehouse(task)
        return [warehouse.find, warehouse.count]

    def score(self, task: dict[str, Any], trajectory: Any) -> dict[str, float]:  # type: ignore[override]
        """The reward, trained on, and its two parts, shown in the report."""
        right = float(trajectory.response.strip() == task["stock"])
        looked_up = float(trajectory.tools["find"].__self__.shelf_found)
        return {"reward": 0.8 * right + 0.2 * looked_up, "right": right, "looked_up": looked_up}

    @property
    def demonstrations(self) -> Demonstrations:
        return Demonstrations()


class Demonstrations:
    """Conversations from which ``agl-slime demo-policy`` teaches a tiny policy the format of calls and answers. In
    imperfect ones most conversations end early, so that training starts from a low reward."""

    def demonstrations(self, rng: random.Random, n: int, *, quality: str) -> list[list[dict[str, Any]]]:
        return [self._conversation(rng, 0.35 if quality == "imperfect" else 0.0) for _ in range(n)]

    def _conversation(self, rng: random.Random, evasive: float) -> list[dict[str, Any]]:
        agent = MyAgent()
        task = agent.make_task(rng)
        messages = agent.build_prompt(task)
        steps = [
            (_call("find", item=task["item"]), task["shelf"]),
            (_call("count", shelf=task["shelf"]), task["stock"]),
            (task["stock"], None),
        ]
        for answer, observation in steps:
            if rng.random() < evasive:
                return [*messages, {"role": "assistant", "content": "I do not know."}]
            messages.append({"role": "assistant", "content": answer})
            if observation is not None:
                messages.append({"role": "tool", "content": observation})
        return messages


def _call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
