"""The lookup agent on tasks of which four in five teach nothing: two always fail, two always succeed.

python benchmarks/mixed_lookup.py tasks.jsonl 2000; python train.py --agent benchmarks/mixed_lookup.py:MixedLookup
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from agl_slime.cli.demo.agent import LookupAgent

KINDS = ("lookup", "fails", "fails", "succeeds", "succeeds")


class MixedLookup(LookupAgent):
    def make_task(self, rng: random.Random) -> dict[str, Any]:
        return {**super().make_task(rng), "kind": rng.choice(KINDS)}

    def compute_reward(self, task: dict[str, Any], response: str) -> float:
        return {"fails": 0.0, "succeeds": 1.0}.get(task["kind"], super().compute_reward(task, response))


if __name__ == "__main__":
    path, n = Path(sys.argv[1]), int(sys.argv[2])
    rng, agent = random.Random(len(sys.argv) > 3 and sys.argv[3]), MixedLookup()
    tasks = (agent.make_task(rng) for _ in iter(int, 1))
    chosen = [task for task, _ in zip(tasks, range(n), strict=False)]
    if len(sys.argv) > 3:  # held-out tasks: lookups alone
        chosen = [{**task, "kind": "lookup"} for task in chosen]
    path.write_text("".join(json.dumps(task) + "\n" for task in chosen))
