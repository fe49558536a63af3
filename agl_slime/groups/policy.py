"""What to do with a group: wait, retry, train on it, drop it.

Policies are small frozen objects without state. ``refuse`` judges a group whose members have all ended. ``judge`` may
be asked at any time before, and says what to do about members that failed or are late. They see results, not samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

from agl_slime.errors import ConfigError
from agl_slime.groups.results import MemberResult


class GroupPolicy(Protocol):
    def refuse(self, *, size: int, members: Sequence[MemberResult]) -> str | None:
        """Why the group of ``size`` expected members is not fit to train on; ``None`` when it is."""
        ...


class GroupAction(str, Enum):
    """``WAIT`` for the members that are out; ``RETRY`` the failed ones; ``TRAIN`` on what is there; ``DROP`` the group.
    With the last two, members still out are to be cancelled."""

    WAIT = "wait"
    RETRY = "retry"
    TRAIN = "train"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProgress:
    """Where a group stands. ``failed`` counts members whose last try failed, ``retries_used`` those tries of the group
    that were repeats; ``waited_s`` is the time since its last member ended, 0 before the first one has: until then its
    rollouts may not have begun, and each has a time limit of its own.
    """

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
    """What to do; ``reason`` is a short word for counting, ``retries`` how many failed members to run again."""

    action: GroupAction
    reason: str = ""
    retries: int = 0


@runtime_checkable
class LateGroupPolicy(GroupPolicy, Protocol):
    """A policy that may be asked before all members have ended. ``timeout_s``: after such a wait its answer may change;
    ``None`` is never."""

    @property
    def timeout_s(self) -> float | None: ...

    def judge(self, progress: GroupProgress) -> GroupVerdict:
        """What to do with the group now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteGroup:
    """Every member must have succeeded: what slime's default rollout function needs, which asserts exact group sizes.

    ``timeout_s`` after the last member ended, a group that still waits for others is dropped (``None``: wait for all).
    """

    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be positive or None, got {self.timeout_s}")

    def refuse(self, *, size: int, members: Sequence[MemberResult]) -> str | None:
        good = sum(member.ok for member in members)
        return None if good == size else f"{size - good} of {size} rollouts failed"

    def judge(self, progress: GroupProgress) -> GroupVerdict:
        """Wait for the last member, whatever happens on the way."""
        if progress.outstanding:
            late = self.timeout_s is not None and progress.waited_s > self.timeout_s
            return (
                GroupVerdict(action=GroupAction.DROP, reason="timeout")
                if late
                else GroupVerdict(action=GroupAction.WAIT)
            )
        return _ended(progress, needed=progress.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailFast(CompleteGroup):
    """Every member must succeed, and the first failure drops the group, so that no engine time goes into the rest."""

    def judge(self, progress: GroupProgress) -> GroupVerdict:
        if progress.failed:
            return GroupVerdict(action=GroupAction.DROP, reason="member_failed")
        return CompleteGroup.judge(self, progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryGroup(CompleteGroup):
    """Every member must succeed; failed ones are run again, ``max_retries`` times in the whole group."""

    max_retries: int = 1

    def __post_init__(self) -> None:
        CompleteGroup.__post_init__(self)
        if self.max_retries < 0:
            raise ConfigError(f"max_retries must not be negative, got {self.max_retries}")

    def judge(self, progress: GroupProgress) -> GroupVerdict:
        return _retry(progress, budget=self.max_retries, wanted=progress.failed) or (
            GroupVerdict(action=GroupAction.DROP, reason="retries_exhausted")
            if progress.failed
            else CompleteGroup.judge(self, progress)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MinimumViableGroup:
    """At least ``min_ratio`` of the members, and never fewer than ``min_members``, must have succeeded.

    A baseline from the survivors is still a baseline of the same prompt; 0.7 is the ratio that slime's rollout buffer
    documents for filtered groups. With one member there is nothing to compare, so ``min_members`` is 2 for groups that
    were meant to have more than one.

    Failed members are run again while the floor is out of reach without them, up to ``max_retries`` in the whole group.
    ``timeout_s`` after the last member ended, a group does not wait for the others any more: it is used when the floor
    is reached and dropped when not (``None``: wait for all). A group that cannot reach the floor any more is dropped at
    once with ``drop_early``, else when all its members have ended.
    """

    min_ratio: float = 0.7
    min_members: int = 2
    max_retries: int = 0
    timeout_s: float | None = None
    drop_early: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.min_ratio <= 1:
            raise ConfigError(f"min_ratio must lie in (0, 1], got {self.min_ratio}")
        if self.max_retries < 0:
            raise ConfigError(f"max_retries must not be negative, got {self.max_retries}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be positive or None, got {self.timeout_s}")

    def floor(self, size: int) -> int:
        """How many members of a group of ``size`` must succeed."""
        return min(
            size, max(self.min_members, math.ceil(self.min_ratio * size - 1e-9))
        )  # 0.07 * 100 is 7.000000000000001

    def refuse(self, *, size: int, members: Sequence[MemberResult]) -> str | None:
        good = sum(member.ok for member in members)
        needed = self.floor(size)
        return None if good >= needed else f"{good} of {size} rollouts succeeded, {needed} are needed"

    def judge(self, progress: GroupProgress) -> GroupVerdict:
        needed = self.floor(progress.size)
        short = needed - progress.succeeded - progress.outstanding  # missing even if all that are out succeed
        if short > 0:
            retry = _retry(progress, budget=self.max_retries, wanted=short)
            if retry is not None and retry.retries == short:
                return retry
            if self.drop_early or not progress.outstanding:
                return GroupVerdict(
                    action=GroupAction.DROP, reason="floor_out_of_reach" if progress.outstanding else "group_incomplete"
                )
        if progress.outstanding:
            if self.timeout_s is None or progress.waited_s <= self.timeout_s:
                return GroupVerdict(action=GroupAction.WAIT)
            if progress.succeeded >= needed:
                return GroupVerdict(action=GroupAction.TRAIN, reason="timeout")
            return GroupVerdict(action=GroupAction.DROP, reason="timeout")
        return _ended(progress, needed=needed)


def _retry(progress: GroupProgress, *, budget: int, wanted: int) -> GroupVerdict | None:
    retries = min(wanted, progress.failed, budget - progress.retries_used)
    return GroupVerdict(action=GroupAction.RETRY, reason="member_failed", retries=retries) if retries > 0 else None


def _ended(progress: GroupProgress, *, needed: int) -> GroupVerdict:
    if progress.succeeded >= needed:
        return GroupVerdict(action=GroupAction.TRAIN)
    return GroupVerdict(action=GroupAction.DROP, reason="group_incomplete")
