"""From finished rollouts to settled groups.

Pure bookkeeping: no threads, no store. A group is known from the moment it is announced (or from its first member). Its
policy is asked whenever a member has ended, and when time has passed; the group settles once, with the members that are
there. What is still out then is told, so that it can be cancelled, and reports of it are recognised as late.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from agl_slime.groups.policy import GroupAction, GroupPolicy, GroupProgress, GroupVerdict, LateGroupPolicy
from agl_slime.groups.results import CUT_OFF, GroupResult, MemberResult, Outcome

GroupFilter = Callable[[Sequence[MemberResult]], str | None]
"""Why the members that a policy would train on are not worth it, as a word to count by; ``None`` when they are."""

# Groups that settled with members still out; reports of those come within moments of their cancellation.
_REMEMBERED_EARLY = 10_000

_MEANINGS = {
    "timeout": "the rest came too late",
    "floor_out_of_reach": "too few can still succeed",
    "retries_exhausted": "no retries are left",
    "zero_variance": "all rewards are the same",
    "not_repeatable": "what failed cannot be run again",
}


@dataclass(slots=True)
class _OpenGroup:
    size: int
    mode: str
    members: dict[str, MemberResult] = field(default_factory=dict)
    enlisted: dict[str, None] = field(default_factory=dict)  # a set in the order of arrival
    former: list[MemberResult] = field(default_factory=list)  # failed tries that were repeated
    last_end: float | None = None


class GroupAssembler:
    """Holds the groups that have not settled.

    Args:
        policy: says when a group is fit to train on; one with ``judge`` is asked before all members have ended, too.
        group_filter: looks at a group that the policy would train on.
        clock: seconds that never go backwards.
    """

    def __init__(
        self,
        *,
        policy: GroupPolicy,
        group_filter: GroupFilter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._judging = policy if isinstance(policy, LateGroupPolicy) else None
        self._filter = group_filter
        self._clock = clock
        self._open: dict[str, _OpenGroup] = {}
        self._early: OrderedDict[str, None] = OrderedDict()
        self._retries: list[MemberResult] = []
        self._held: set[str] = set()  # rollouts that have ended and wait for their groups

    def __len__(self) -> int:
        return len(self._open)

    def announce(self, group_id: str, *, size: int, mode: str = "train") -> None:
        """Expect ``size`` members under ``group_id``. A second announcement changes nothing."""
        self._open.setdefault(group_id, _OpenGroup(size, mode))

    def enlist(self, group_id: str, rollout_id: str) -> bool:
        """This rollout is a member of the group. ``False`` when the group has settled without it: it is to be
        cancelled."""
        group = self._open.get(group_id)
        if group is not None:
            group.enlisted[rollout_id] = None
        return group_id not in self._early

    def settled_early(self, group_id: str) -> bool:
        """Whether the group has settled with members still out."""
        return group_id in self._early

    @property
    def early(self) -> list[str]:
        """The groups that settled with members still out, the last of them."""
        return list(self._early)

    def remember_early(self, group_ids: Iterable[str]) -> None:
        """These settled with members still out in a former life of the run."""
        self._early.update(dict.fromkeys(group_ids))

    def holds(self, rollout_id: str) -> bool:
        """Whether this rollout has ended and waits for its group."""
        return rollout_id in self._held

    def add(self, member: MemberResult, *, default_size: int = 1) -> GroupResult | None:
        """Take a finished rollout in; the group, when that settles it. ``default_size`` is the size of a group that
        nobody announced. A rollout that is there already, or whose group has settled without it, is ignored."""
        if member.group_id in self._early:
            return None
        group = self._open.setdefault(member.group_id, _OpenGroup(default_size, member.mode))
        if member.rollout_id in group.members:
            return None
        group.members[member.rollout_id] = member
        self._held.add(member.rollout_id)
        group.last_end = self._clock()
        return self._judge(member.group_id, group)

    def late(self) -> list[GroupResult]:
        """The groups that settle because time has passed."""
        if self._judging is None or self._judging.timeout_s is None:
            return []
        waiting = [(group_id, group) for group_id, group in self._open.items() if group.last_end is not None]
        return [settled for group_id, group in waiting if (settled := self._judge(group_id, group)) is not None]

    def take_retries(self) -> list[MemberResult]:
        """Failed members that are to be run again, once each; whoever takes them enqueues their ``request`` and enlists
        the new rollouts."""
        retries, self._retries = self._retries, []
        return retries

    def forget(self, group_ids: Iterable[str]) -> None:
        """These groups will not settle any more."""
        for group_id in group_ids:
            group = self._open.pop(group_id, None)
            if group is not None:
                self._held.difference_update(group.members)

    def clear(self) -> None:
        """Forget every group that has not settled."""
        self._open.clear()
        self._held.clear()

    def members_waiting(self) -> list[MemberResult]:
        """The finished rollouts whose groups wait for others."""
        return [member for group in self._open.values() for member in group.members.values()]

    # -- judging ------------------------------------------------------------------------------------------------------

    def _judge(self, group_id: str, group: _OpenGroup) -> GroupResult | None:
        complete = len(group.members) >= group.size
        if group.mode != "train":
            return (
                self._settle(group_id, group, ready=False, reason="validation", code="validation") if complete else None
            )
        verdict = self._verdict(group, complete=complete)
        if verdict.action is GroupAction.RETRY:
            if self._retry(group, verdict.retries):
                return None
            verdict = GroupVerdict(action=GroupAction.DROP, reason="not_repeatable")
        if verdict.action is GroupAction.WAIT:
            return None
        members = list(group.members.values())
        if verdict.action is GroupAction.TRAIN:
            code = self._filter([member for member in members if member.ok]) if self._filter is not None else None
            return self._settle(
                group_id, group, ready=code is None, reason=_MEANINGS.get(code or "", code or ""), code=code or ""
            )
        code = verdict.reason or "group_incomplete"
        sentence = (
            self._policy.refuse(size=group.size, members=members)
            or f"{len(members)} of {group.size} rollouts have ended"
        )
        meaning = _MEANINGS.get(code)
        return self._settle(
            group_id, group, ready=False, reason=f"{sentence} ({meaning})" if meaning else sentence, code=code
        )

    def _verdict(self, group: _OpenGroup, *, complete: bool) -> GroupVerdict:
        if self._judging is None:
            if not complete:
                return GroupVerdict(action=GroupAction.WAIT)
            fit = self._policy.refuse(size=group.size, members=list(group.members.values())) is None
            return GroupVerdict(action=GroupAction.TRAIN if fit else GroupAction.DROP)
        succeeded = sum(member.ok for member in group.members.values())
        return self._judging.judge(
            GroupProgress(
                size=group.size,
                succeeded=succeeded,
                failed=len(group.members) - succeeded,
                retries_used=len(group.former),
                waited_s=0.0 if group.last_end is None else self._clock() - group.last_end,
            )
        )

    def _retry(self, group: _OpenGroup, n: int) -> bool:
        """Mark ``n`` failed members as to be run again; ``False`` when there are not so many that can be."""
        again = [member for member in group.members.values() if not member.ok and member.request is not None][:n]
        if len(again) < n:
            return False
        for member in again:
            del group.members[member.rollout_id]
            self._held.discard(member.rollout_id)
            group.enlisted.pop(member.rollout_id, None)
        group.former.extend(again)
        self._retries.extend(again)
        return True

    def _settle(self, group_id: str, group: _OpenGroup, *, ready: bool, reason: str, code: str) -> GroupResult:
        del self._open[group_id]
        self._held.difference_update(group.members)
        if len(group.members) < group.size:
            self._early[group_id] = None
            if len(self._early) > _REMEMBERED_EARLY:
                self._early.popitem(last=False)
        known = next(iter(group.members.values()))
        reason_out = CUT_OFF[0] if code in ("", "timeout") else CUT_OFF[1]
        out = [
            _cut_off(rollout_id, known, reason_out) for rollout_id in group.enlisted if rollout_id not in group.members
        ]
        members = (*group.members.values(), *group.former, *out)
        return GroupResult(
            group_id=group_id, mode=group.mode, size=group.size, members=members, ready=ready, reason=reason, code=code
        )


def _cut_off(rollout_id: str, member: MemberResult, reason: str) -> MemberResult:
    """A rollout of ``member``'s group that had not ended when the group settled."""
    return MemberResult(
        rollout_id=rollout_id,
        group_id=member.group_id,
        mode=member.mode,
        group_size=member.group_size,
        failure=reason,
        failure_message="its group settled without it",
        outcome_if_failed=Outcome.CANCELLED,
        task=member.task,
        instance_id=member.instance_id,
    )
