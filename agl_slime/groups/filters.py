"""What a group that is fit to train on may still lack."""

from __future__ import annotations

from collections.abc import Sequence

from agl_slime.groups.results import MemberResult

# Rewards closer than this are the same: slime's own threshold.
_EQUAL_REWARDS = 1e-6


def zero_variance(members: Sequence[MemberResult]) -> str | None:
    """``"zero_variance"`` for two or more members with one and the same reward: with nothing to compare, every
    advantage is 0."""
    rewards = [member.reward for member in members if member.reward is not None]
    return "zero_variance" if len(rewards) > 1 and all_equal(rewards) else None


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether these rewards, one or more, leave nothing to compare."""
    return max(rewards) - min(rewards) <= _EQUAL_REWARDS
