"""The lookup agent by declaration: a tool, a scheduler and a limit of turns in place of ``run``.

python train.py --agent agents/lookup_tools.py:LookupToolsAgent
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from agl_slime import SGLangLitAgent
from agl_slime.agent.scheduler import MultiTurnScheduler, RolloutInferRequest, RolloutResponseChoice
from agl_slime.cli.demo.formats import LookupDemonstrations

DEMONSTRATIONS = LookupDemonstrations()


class LookupTable:
    """The table of one task; a class, since each rollout needs its own."""

    schema = {
        "name": DEMONSTRATIONS.tool_name,
        "description": "Look up what is stored under a key.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    }

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._task = task

    def __call__(self, key: str) -> str:
        return DEMONSTRATIONS.observation(self._task, key)


class FirstAnswer(MultiTurnScheduler):
    """An answer that calls no tool ends the rollout, right or wrong."""

    def check_finished(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> bool:
        super().check_finished(infer_request, result, current_turn)  # sets the stop reason
        return True

    def step(
        self, infer_request: RolloutInferRequest, result: RolloutResponseChoice, current_turn: int
    ) -> RolloutInferRequest:
        return infer_request


class LookupToolsAgent(SGLangLitAgent):
    demonstrations = DEMONSTRATIONS  # the task's texts, and the tiny policy's demonstrations
    tools = [LookupTable]
    tools_in_prompt = False  # the system message says how to call
    scheduler = FirstAnswer
    max_turns = 2

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        return self.demonstrations.make_task(rng)

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return self.demonstrations.prompt(task)

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return 1.0 if self.demonstrations.is_correct(task, response) else 0.0
