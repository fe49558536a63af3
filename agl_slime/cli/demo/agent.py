"""The agent of the first command: call ``lookup`` with the key of the question, and answer with the result.

The value is random: only a call with the right key, and a copy of its result, is rewarded. ``agents/lookup.py`` is the
same agent as a file to copy.
"""

from __future__ import annotations

import random
import re
from typing import Any

from agl_slime import RolloutSession, SGLangLitAgent
from agl_slime.cli.demo.formats import LookupDemonstrations

_CALL = re.compile(
    r'<tool_call>\s*\{\s*"name":\s*"lookup",\s*"arguments":\s*\{\s*"key":\s*"([^"]*)"\s*\}\s*\}\s*</tool_call>'
)


class LookupAgent(SGLangLitAgent):
    # the prompts, and the conversations that the tiny policy is warmed up on
    demonstrations = LookupDemonstrations()

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        return self.demonstrations.make_task(rng)

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return self.demonstrations.prompt(task)

    async def run(self, task: dict[str, Any], session: RolloutSession) -> None:
        called = _CALL.search((await session.ask()).text)
        if called is not None:  # else the reward is for this answer
            await session.ask({"role": "tool", "content": self.demonstrations.observation(task, called[1])})

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return 1.0 if self.demonstrations.is_correct(task, response) else 0.0
