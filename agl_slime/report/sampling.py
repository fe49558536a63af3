"""The choice of kept rollouts: best, worst, random and failed, spread over the run within a budget of bytes."""

from __future__ import annotations

import random
from collections.abc import Mapping


def choose_rollouts(rewards: Mapping[str, float | None], *, iteration: int, seed: int = 0) -> dict[str, str]:
    """Rollout id → ``"best"``, ``"worst"``, ``"random"`` or ``"failed"`` (the first one without a reward).

    The random one depends on ``seed``, ``iteration`` and the order of ``rewards`` only.
    """
    scored = {rollout_id: reward for rollout_id, reward in rewards.items() if reward is not None}
    chosen: dict[str, str] = {}
    if scored:
        chosen[max(scored, key=scored.__getitem__)] = "best"
        chosen.setdefault(min(scored, key=scored.__getitem__), "worst")
        if others := [rollout_id for rollout_id in scored if rollout_id not in chosen]:
            chosen[random.Random(f"{seed}:{iteration}").choice(others)] = "random"
    chosen.update([(rollout_id, "failed") for rollout_id in rewards if rollout_id not in scored][:1])
    return chosen


class SizeBudget:
    """Bytes that may still be written. Each time half of the rest is used, the stride between recorded iterations
    doubles, so that a long run is covered to its end."""

    def __init__(self, n_bytes: int) -> None:
        self._left, self._stride = n_bytes, 1
        self._next_halving = n_bytes // 2

    def allows(self, iteration: int) -> bool:
        """Whether this iteration is recorded."""
        return self._left > 0 and iteration % self._stride == 0

    def take(self, n_bytes: int) -> bool:
        """Use ``n_bytes``; False when they exceed the rest. Then the stride doubles: a smaller record may still fit."""
        if n_bytes > self._left:
            self._stride *= 2
            return False
        self._left -= n_bytes
        while self._left < self._next_halving:
            self._next_halving //= 2
            self._stride *= 2
        return True
