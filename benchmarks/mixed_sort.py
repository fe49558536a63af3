"""Letters to be sorted, two to six of them: a tiny policy's alphabet sort with mixed difficulty.

agl-slime demo-policy tiny benchmarks/mixed_sort.py:MixedSort
python benchmarks/learning.py --agent benchmarks/mixed_sort.py:MixedSort --until 0.85 \\
    --variants "" "--task-sampling learnable" -- --model-path tiny --rollout-batch-size 8 --n-samples-per-prompt 8 \\
    --num-iterations 80 --eval-interval 2 --eval-rollouts 64
"""

from __future__ import annotations

import random
from typing import Any

from agl_slime import SGLangLitAgent

Messages = list[dict[str, Any]]


class Demonstrations:
    def demonstrations(self, rng: random.Random, n: int, *, quality: str) -> list[Messages]:
        return [self.conversation(rng, shuffled=0.75 if quality == "imperfect" else 0.0) for _ in range(n)]

    def conversation(self, rng: random.Random, *, shuffled: float) -> Messages:
        agent = MixedSort()
        task = agent.make_task(rng)
        letters = list(task["label"])
        if shuffled and rng.random() < shuffled:
            rng.shuffle(letters)
        return [*agent.build_prompt(task), {"role": "assistant", "content": "".join(letters)}]


class MixedSort(SGLangLitAgent):
    demonstrations = Demonstrations()

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        letters = rng.sample("abcdefghij", rng.choice((2, 3, 4, 5, 6)))
        return {"letters": "".join(letters), "label": "".join(sorted(letters)), "kind": f"{len(letters)}"}

    def build_prompt(self, task: dict[str, Any]) -> Messages:
        return [{"role": "user", "content": f"Sort {' '.join(task['letters'])}"}]

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return float(response.strip() == task["label"])
