"""A one-turn agent: write three letters backwards. First ``agl-slime demo-policy tiny agents/reverse.py:ReverseAgent``,
then ``python train.py --agent agents/reverse.py:ReverseAgent --model-path tiny``."""

from __future__ import annotations

import random
from typing import Any

from agl_slime import SGLangLitAgent
from agl_slime.cli.demo.formats import ReverseDemonstrations


class ReverseAgent(SGLangLitAgent):
    demonstrations = ReverseDemonstrations()

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        return self.demonstrations.make_task(rng)

    def build_prompt(self, task: dict[str, Any]) -> list[dict[str, Any]]:
        return self.demonstrations.prompt(task)

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return 1.0 if self.demonstrations.is_correct(task, response) else 0.0
