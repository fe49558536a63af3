"""The agent of the first command: call ``lookup`` with the key of the question, read what it returns, answer with it.

The value is random, so the only way to a reward is to call the tool with the right key and to copy what it says.
``agents/lookup.py`` is the same as a file to copy.
"""

from __future__ import annotations

import random
import re
from typing import Any

from agl_slime import RolloutSession, SGLangLitAgent
from agl_slime.demo.formats import LookupDemonstrations

_CALL = re.compile(
    r'<tool_call>\s*\{\s*"name":\s*"lookup",\s*"arguments":\s*\{\s*"key":\s*"([^"]*)"\s*\}\s*\}\s*</tool_call>'
)


class LookupAgent(SGLangLitAgent):
    # the wording of the task, and the demonstrations that the tiny policy learns its format from
    demonstrations = LookupDemonstrations()

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        return self.demonstrations.make_task(rng)

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return self.demonstrations.prompt(task)

    async def run(self, task: dict[str, Any], session: RolloutSession) -> None:
        called = _CALL.search((await session.ask()).text)
        if called is not None:  # else that answer is what compute_reward will see
            await session.ask({"role": "tool", "content": self.demonstrations.observation(task, called[1])})

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return 1.0 if self.demonstrations.is_correct(task, response) else 0.0
