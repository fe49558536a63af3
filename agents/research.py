"""A three-turn agent with two tools: ``find`` returns the page of a key, ``read`` the word on the page, and the answer
is this word.

Page and word are random, so the only way to a reward is to call both tools, the second with the first one's result.

    agl-slime demo-policy tiny agents/research.py:ResearchAgent
    python train.py --agent agents/research.py:ResearchAgent --model-path tiny
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agl_slime import SGLangLitAgent
from agl_slime.cli.demo.formats import UNSURE, Demonstration, Message, Quality

_LETTERS = "bcdfghjkmnpqrstvwxz"
_DIGITS = "23456789"


@dataclass(frozen=True, kw_only=True)
class ResearchDemonstrations:
    """Tasks such as ``{"key": "kz", "page": "47", "answer": "mt"}``, and demonstrations of them.

    ``blur`` is the share of turns in imperfect demonstrations that evade; a conversation ends at such a turn.
    """

    blur: float = 0.35

    system = "Find the page, read it, then answer with what it holds."

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        def word(alphabet: str) -> str:
            return "".join(rng.choice(alphabet) for _ in range(2))

        return {"key": word(_LETTERS), "page": word(_DIGITS), "answer": word(_LETTERS)}

    def prompt(self, task: Mapping[str, Any]) -> list[Message]:
        return [
            {"role": "system", "content": self.system},
            {"role": "user", "content": f'What is stored under "{task["key"]}"?'},
        ]

    def demonstrations(self, rng: random.Random, n: int, *, quality: Quality) -> list[Demonstration]:
        return [self._one(rng, self.blur if quality == "imperfect" else 0.0) for _ in range(n)]

    def _one(self, rng: random.Random, blur: float) -> Demonstration:
        task = self.make_task(rng)
        conversation = self.prompt(task)
        steps = (
            (call("find", task["key"]), task["page"]),
            (call("read", task["page"]), task["answer"]),
            (task["answer"], None),
        )
        for answer, observed in steps:
            evades = rng.random() < blur
            conversation.append({"role": "assistant", "content": UNSURE if evades else answer})
            if evades or observed is None:
                break
            conversation.append({"role": "tool", "content": observed})
        return conversation


def call(tool: str, argument: str) -> str:
    """A tool call in the model's text."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': {'key': argument}})}</tool_call>"


class ResearchAgent(SGLangLitAgent):
    demonstrations = ResearchDemonstrations()
    tools_in_prompt = False  # the system message and the demonstrations say how to call
    max_turns = 3

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        return self.demonstrations.make_task(rng)

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return self.demonstrations.prompt(task)

    def build_tools(self, task: dict[str, Any]) -> Sequence[Any]:
        def find(key: str) -> str:
            """Find the page of a key."""
            return task["page"] if key == task["key"] else "not found"

        def read(key: str) -> str:
            """Read a page."""
            return task["answer"] if key == task["page"] else "not found"

        return [find, read]

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return 1.0 if response.strip() == task["answer"] else 0.0
