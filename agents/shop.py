"""A two-turn tool task at the size of SmolLM2-135M: ask a tool for the price of an item, then answer with it.

python train.py --model smollm2 --agent agents/shop.py:Shop

The model's chat template has no tools, so the conversation begins with two sales as examples. With two, 16 of 32 first
answers were the right call; with one, none of 16; with a call in the system message instead, none of 128. A call with
the right item earns a fifth of the reward, the right number the rest.

How its reward rose: docs/trainer.md.
"""

from __future__ import annotations

import random
import re
from typing import Any

from agl_slime import SGLangLitAgent
from agl_slime.tokens.turn import Trajectory

_ITEMS = "apple book chair clock cup hat knife lamp map pen ring rope shoe spoon table violin"
ITEMS = _ITEMS.split()
EXAMPLES = {"ball": "31", "sock": "84"}


class Price:
    """The price list of one task; a class, since each rollout needs its own."""

    schema = {
        "name": "price",
        "description": "What an item costs.",
        "parameters": {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]},
    }

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task

    def __call__(self, item: str) -> str:
        exists = item.strip().lower() == self._task["item"]
        return f"{self._task['label']} coins" if exists else "There is no such item."


class Shop(SGLangLitAgent):
    tools = [Price]
    tools_in_prompt, tool_parser = False, "hermes"
    max_turns = 2

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        return {"item": rng.choice(ITEMS), "label": str(rng.randrange(10, 100))}

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        messages = [{"role": "system", "content": "Ask for the price, then answer with the number."}]
        for item, number in EXAMPLES.items():
            call = f'<tool_call>{{"name": "price", "arguments": {{"item": "{item}"}}}}</tool_call>'
            messages += [
                {"role": "user", "content": f"What does the {item} cost?"},
                {"role": "assistant", "content": call},
                {"role": "tool", "content": f"{number} coins"},
                {"role": "assistant", "content": number},
            ]
        return [*messages, {"role": "user", "content": f"What does the {task['item']} cost?"}]

    async def score(self, task: dict[str, Any], trajectory: Trajectory) -> float:
        called = len(trajectory.turns) > 1 and f'"{task["item"]}"' in trajectory.turns[0].text
        return 0.2 * called + 0.8 * (called and re.findall(r"\d+", trajectory.response) == [task["label"]])
