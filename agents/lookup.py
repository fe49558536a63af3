"""A two-turn agent with a tool: call ``lookup`` with the key of the question, read what it returns, answer with it.

The value is random, so the only way to a reward is to call the tool with the right key and to copy its result.
``python train.py`` runs the same agent from inside the package; a copy of this file runs as

    python train.py --agent path/to/lookup.py:LookupAgent
"""

from __future__ import annotations

import json
import random
import re
from typing import Any

from agl_slime import RolloutSession, SGLangLitAgent
from agl_slime.cli.demo.formats import LookupDemonstrations

_TOOL_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class LookupAgent(SGLangLitAgent):
    # the task's texts, and the demonstrations from which the tiny policy learns its format
    demonstrations = LookupDemonstrations()

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        return self.demonstrations.make_task(rng)

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return self.demonstrations.prompt(task)

    async def run(self, task: dict[str, Any], session: RolloutSession) -> None:
        answer = await session.ask()
        key = called_key(answer.text)
        if key is None:
            return  # no tool call: compute_reward gets this answer
        await session.ask({"role": "tool", "content": self.demonstrations.observation(task, key)})

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return 1.0 if self.demonstrations.is_correct(task, response) else 0.0


def called_key(text: str) -> str | None:
    """The key of a well-formed call of ``lookup`` in the text; ``None`` when there is none."""
    match = _TOOL_CALL.search(text)
    if match is None:
        return None
    try:
        call = json.loads(match.group(1))
        key = call["arguments"]["key"] if call["name"] == "lookup" else None
    except (ValueError, KeyError, TypeError):
        return None
    return key if isinstance(key, str) else None
