"""From finished rollouts to settled groups.

Pure bookkeeping: no threads, no store. A group is known from the moment it is announced (or from its first member); it settles when every member has
ended, and is then judged once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from agl_slime.groups.outcome import GroupResult, MemberResult
from agl_slime.groups.policy import GroupPolicy


@dataclass(slots=True)
class _OpenGroup:
    size: int
    mode: str
    members: dict[str, MemberResult] = field(default_factory=dict)


class GroupAssembler:
    """Holds the groups that have not settled; ``add`` returns the group when its last member arrives."""

    def __init__(self, *, policy: GroupPolicy) -> None:
        self._policy = policy
        self._open: dict[str, _OpenGroup] = {}

    def __len__(self) -> int:
        return len(self._open)

    def announce(self, group_id: str, *, size: int, mode: str = "train") -> None:
        """Expect ``size`` members under ``group_id``. A second announcement changes nothing."""
        self._open.setdefault(group_id, _OpenGroup(size, mode))

    def add(self, member: MemberResult, *, default_size: int = 1) -> GroupResult | None:
        """Take a finished rollout in; ``default_size`` is the size of a group that nobody announced. A rollout that is there already is ignored."""
        group = self._open.setdefault(member.group_id, _OpenGroup(default_size, member.mode))
        if member.rollout_id in group.members:
            return None
        group.members[member.rollout_id] = member
        if len(group.members) < group.size:
            return None
        del self._open[member.group_id]
        members = tuple(group.members.values())
        if group.mode != "train":
            return GroupResult(group_id=member.group_id, mode=group.mode, size=group.size, members=members, ready=False, reason="validation")
        reason = self._policy.refuse(size=group.size, members=members)
        return GroupResult(group_id=member.group_id, mode=group.mode, size=group.size, members=members, ready=reason is None, reason=reason or "")

    def forget(self, group_ids: Iterable[str]) -> None:
        """These groups will not settle any more."""
        for group_id in group_ids:
            self._open.pop(group_id, None)

    def clear(self) -> None:
        """Forget every group that has not settled."""
        self._open.clear()

    def members_waiting(self) -> list[MemberResult]:
        """The finished rollouts whose groups wait for others."""
        return [member for group in self._open.values() for member in group.members.values()]
