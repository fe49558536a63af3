"""The example agent, with a judge that is out of order now and then."""

from collections import Counter
from dataclasses import replace
from typing import Any

from agl_slime.cli.demo.agent import LookupAgent
from agl_slime.errors import RewardError
from agl_slime.tokens.turn import Trajectory

_EVERY = 7


class FlakyLookup(LookupAgent):
    """Every seventh training rollout fails, so some groups are dropped and replaced, and so does the first validation
    rollout of a process. It also asks twice for one token, which is often the same."""

    def __init__(self) -> None:
        super().__init__()
        self._scored: Counter[str | None] = Counter()

    async def run(self, task: dict[str, Any], session: Any) -> None:
        for branch in [session.branch(session.messages) for _ in range(2)]:
            await branch.ask(sampling=replace(session.sampling, max_new_tokens=1))
        await super().run(task, session)

    async def score(self, task: dict[str, Any], trajectory: Trajectory) -> Any:
        self._scored[trajectory.mode] += 1
        n = self._scored[trajectory.mode]
        if n == 1 if trajectory.mode == "val" else n % _EVERY == 0:
            raise RewardError("the judge is out of order")
        return await super().score(task, trajectory)
