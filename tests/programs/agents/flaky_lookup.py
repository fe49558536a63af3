"""The example agent, with a judge that is out of order now and then."""

from collections import Counter
from typing import Any

from agl_slime.cli.demo.agent import LookupAgent
from agl_slime.errors import RewardError
from agl_slime.tokens.turn import Trajectory

_EVERY = 7


class FlakyLookup(LookupAgent):
    """Every seventh training rollout fails, so some groups are dropped and replaced, and so does the first validation
    rollout of a process."""

    def __init__(self) -> None:
        super().__init__()
        self._scored: Counter[str | None] = Counter()

    async def score(self, task: dict[str, Any], trajectory: Trajectory) -> Any:
        self._scored[trajectory.mode] += 1
        n = self._scored[trajectory.mode]
        if n == 1 if trajectory.mode == "val" else n % _EVERY == 0:
            raise RewardError("the judge is out of order")
        return await super().score(task, trajectory)
