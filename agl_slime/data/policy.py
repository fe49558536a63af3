"""Group policies: wait for a group, retry members, train on it or drop it; and a filter of groups without advantage.

Policies are small frozen objects without state, and see results, not samples. ``refuse`` judges a group whose members
have all ended; ``judge``, which may be called earlier, decides about failed and late members.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

from agl_slime.data.normalize import all_equal
from agl_slime.data.results import MemberResult
from agl_slime.support.ranges import check_ranges

GroupFilter = Callable[[Sequence[MemberResult]], str | None]
"""Of the successful members of an accepted group: the reason to drop it, as a metric name, or ``None`` to keep it."""


class GroupAction(StrEnum):
    """``WAIT`` for members in flight; ``RETRY`` failed members; ``TRAIN`` on the successful members; ``DROP`` the
    group. The last two cancel members in flight."""

    WAIT = "wait"
    RETRY = "retry"
    TRAIN = "train"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """A group's progress. ``failed`` counts members whose last attempt failed, ``retries_used`` the retries so far.
    ``waited_s`` is the time since the last member ended; 0 while none has, as the rollouts may not have started and
    each has its own time limit."""

    size: int
    succeeded: int = 0
    failed: int = 0
    retries_used: int = 0
    waited_s: float = 0.0

    @property
    def outstanding(self) -> int:
        return self.size - self.succeeded - self.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupVerdict:
    """A policy's decision; ``reason`` is a metric name, ``retries`` the number of failed members to run again."""

    action: GroupAction
    reason: str = ""
    retries: int = 0


class GroupPolicy(Protocol):
    """Decides about groups. Optional: ``judge(progress: GroupProgress) -> GroupVerdict``, called before all members
    have ended, and ``timeout_s``, after which its verdict may change."""

    def refuse(self, *, size: int, members: Sequence[MemberResult]) -> str | None:
        """The reason not to train on a group of ``size`` expected members; ``None`` to train on it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimumViableGroup:
    """At least ``min_ratio`` of the members, and never fewer than ``min_members``, must have succeeded: they still give
    a baseline of the same prompt. 0.7 is the value that slime's rollout buffer documents."""

    codes: ClassVar[tuple[str, str]] = ("floor_out_of_reach", "group_incomplete")
    """Reasons of a drop with members in flight, and without."""

    min_ratio: float = 0.7
    """Share of a group's rollouts that must succeed, but at least 2 rollouts; 1 is all of them."""
    min_members: int = 2
    """Fewest members that must succeed, whatever their share."""
    max_retries: int = 0
    """Most failed rollouts of a group that are retried when the group would be dropped without them."""
    timeout_s: float | None = None
    """Seconds after a group's last ended rollout after which its stragglers are cancelled; by default never."""
    drop_early: bool = True
    """Drop a group that can no longer reach the minimum at once; False: when all members have ended."""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            ("min_ratio", lambda value: 0 < value <= 1, "in (0, 1]"),
            ("max_retries", lambda value: value >= 0, "0 or more"),
            ("timeout_s", lambda value: value > 0, "above 0 seconds or None"),
        )

    def floor(self, size: int) -> int:
        """How many members of a group of ``size`` must succeed."""
        needed = math.ceil(self.min_ratio * size - 1e-9)  # 0.07 * 100 is 7.000000000000001
        return min(size, max(self.min_members, needed))

    def refuse(self, *, size: int, members: Sequence[MemberResult]) -> str | None:
        good, needed = sum(member.ok for member in members), self.floor(size)
        return None if good >= needed else f"{good} of {size} rollouts succeeded, {needed} are needed"

    def judge(self, progress: GroupProgress) -> GroupVerdict:
        needed = self.floor(progress.size)
        short = needed - progress.succeeded - progress.outstanding  # even if all in flight succeed
        if short > 0:
            if short <= min(progress.failed, self.max_retries - progress.retries_used):
                return GroupVerdict(action=GroupAction.RETRY, reason="member_failed", retries=short)
            if self.drop_early or not progress.outstanding:
                return GroupVerdict(action=GroupAction.DROP, reason=self.codes[not progress.outstanding])
        if not progress.outstanding:
            return GroupVerdict(action=GroupAction.TRAIN)
        if self.timeout_s is None or progress.waited_s <= self.timeout_s:
            return GroupVerdict(action=GroupAction.WAIT)
        action = GroupAction.TRAIN if progress.succeeded >= needed else GroupAction.DROP
        return GroupVerdict(action=action, reason="timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteGroup(MinimumViableGroup):
    """Every member must have succeeded, as slime's default rollout function asserts exact group sizes. Judged when the
    last member has ended; dropped after ``timeout_s``."""

    min_ratio: float = 1.0
    drop_early: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryGroup(MinimumViableGroup):
    """Every member must succeed; failed members are run again, ``max_retries`` times in the whole group."""

    codes = ("retries_exhausted", "retries_exhausted")

    min_ratio: float = 1.0
    max_retries: int = 1


def zero_variance(members: Sequence[MemberResult]) -> str | None:
    """A ``GroupFilter``: ``"zero_variance"`` for two or more members with equal rewards, whose advantages are all 0."""
    rewards = [member.reward for member in members if member.reward is not None]
    return "zero_variance" if len(rewards) > 1 and all_equal(rewards) else None
