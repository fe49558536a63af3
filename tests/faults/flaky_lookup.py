"""The example agent, with a judge that is out of order now and then."""

from __future__ import annotations

import random
from typing import Any

from agl_slime.cli.demo.agent import LookupAgent
from agl_slime.errors import RewardError

_FAILS = 0.15


class FlakyLookup(LookupAgent):
    """Some rollouts fail, so some groups are dropped and replaced."""

    def compute_reward(self, task: dict[str, Any], response: str) -> Any:
        if random.random() < _FAILS:
            raise RewardError("the judge is out of order")
        return super().compute_reward(task, response)
