"""Assembly of finished rollouts into groups, and their finalization.

Bookkeeping only: no threads, no store. A group exists from its announcement, or from its first member. The policy is
consulted whenever a member ends and when time passes; a group is finalized once, with its members of that moment. The
data source calls this under its lock and applies ``take_unwanted`` (cancel) and ``take_requests`` (enqueue) to the
store.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from agl_slime.data.delivery import Delivery
from agl_slime.data.ledger import Ledger
from agl_slime.data.normalize import all_equal
from agl_slime.data.policy import GroupAction, GroupFilter, GroupPolicy, GroupProgress, GroupVerdict
from agl_slime.data.results import STRAGGLER_REASONS, GroupResult, MemberResult, Outcome, instance_of
from agl_slime.support.agl import EnqueueRolloutRequest, Rollout

# Ids of groups that were finalized with members in flight; late members end soon after their cancellation.
_MAX_EARLY_GROUPS = 10_000


@dataclass(slots=True)
class _OpenGroup:
    size: int
    mode: str
    members: dict[str, MemberResult] = field(default_factory=dict)
    enlisted: dict[str, None] = field(default_factory=dict)  # an ordered set
    retried: list[MemberResult] = field(default_factory=list)  # failed tries
    last_end: float | None = None
    rest: list[EnqueueRolloutRequest] = field(default_factory=list)  # of members that run if the first ones differ


class GroupAssembler:
    """Groups from their announcement until they are ready or dropped. Not thread-safe.

    Args:
        policy: decides when a group may be trained on; a policy with ``judge`` also decides before all members ended.
        group_filter: may drop a group that the policy accepted.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        policy: GroupPolicy,
        group_filter: GroupFilter | None = None,
        ledger: Ledger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger = ledger if ledger is not None else Ledger()
        self.delivery = Delivery(self.ledger)
        """The groups that are ready to train on."""
        self._policy, self._filter, self._clock = policy, group_filter, clock
        self._has_timeout = getattr(policy, "timeout_s", None) is not None
        self._open: dict[str, _OpenGroup] = {}
        self._waiting_ids: set[str] = set()  # finished rollouts of open groups
        self._cut_short: OrderedDict[str, None] = OrderedDict()  # groups that were finalized with members in flight
        self._unwanted: list[str] = []
        self._requests: list[EnqueueRolloutRequest] = []
        self.teaches: Callable[[Any], bool] = lambda task: False
        """Whether the rest of a task's group runs although its first rewards are equal (``hold_back``)."""

    def __len__(self) -> int:
        """The number of groups that are not finalized."""
        return len(self._open)

    def announce(self, group_id: str, *, size: int, mode: str = "train") -> None:
        """Expect ``size`` members under ``group_id``. A second announcement changes nothing."""
        self._open.setdefault(group_id, _OpenGroup(size, mode))

    def hold_back(self, group_id: str, rest: Sequence[EnqueueRolloutRequest]) -> None:
        """Begin an announced group without its last members: ``take_requests`` has them once its first have ended, if
        their rewards differ, fewer than two have one, or its task ``teaches``. Otherwise it is dropped."""
        self._open[group_id].rest = [*rest]

    def opened(self, rollouts: Sequence[Rollout | str]) -> None:
        """Note that these rollouts are in flight. A group may be finalized without members that come as ``Rollout``."""
        named = [rollout for rollout in rollouts if not isinstance(rollout, str)]
        ids = [(rollout_id, None) for rollout_id in rollouts if isinstance(rollout_id, str)]
        self.ledger.open_many(ids + [(each.rollout_id, instance_of(each.metadata or {})) for each in named])
        late = []
        for rollout in named:
            group_id = str((rollout.metadata or {}).get("group_id"))
            if group_id in self._open:
                self._open[group_id].enlisted[rollout.rollout_id] = None
            elif group_id in self._cut_short:
                late.append(rollout.rollout_id)
        self._cancel(late, "group_finalized")

    def has_ended(self, rollout_id: str) -> bool:
        """Whether this rollout was added, or ended earlier according to the ledger."""
        return rollout_id in self._waiting_ids or self.ledger.has_ended(rollout_id)

    def add(self, member: MemberResult, *, default_size: int = 1) -> tuple[MemberResult, GroupResult | None] | None:
        """Add a finished rollout. Returns it, with its group if that is finalized now; ``None`` for a repeated rollout,
        or one whose group was finalized without it. ``default_size``: the size of a group that was not announced."""
        if not self.ledger.is_open(member.rollout_id):  # not announced: opened now
            if not self.ledger.open_many([(member.rollout_id, member.instance_id)]):
                return None
        elif member.rollout_id in self._waiting_ids:
            return None
        if member.group_id in self._cut_short:
            self.ledger.close_many([member.rollout_id], Outcome.CANCELLED, "group_finalized")
            return None
        group = self._open.setdefault(member.group_id, _OpenGroup(default_size, member.mode))
        if not member.ok:
            self.ledger.close_many([member.rollout_id], member.outcome_if_failed, member.failure or "")
        elif group.mode != "train":
            self.ledger.close_many([member.rollout_id], Outcome.VALIDATED)
        group.members[member.rollout_id] = member
        self._waiting_ids.add(member.rollout_id)
        group.last_end = self._clock()
        return member, self._judge(member.group_id, group)

    def late(self) -> list[GroupResult]:
        """Finalize the groups whose timeout has passed, and return them."""
        if not self._has_timeout:
            return []
        waiting = [(group_id, group) for group_id, group in self._open.items() if group.last_end is not None]
        return [done for group_id, group in waiting if (done := self._judge(group_id, group)) is not None]

    def abandon(self, rollout_ids: Iterable[str], *, group_ids: Iterable[str] = (), reason: str) -> None:
        """Forget these groups, and count these rollouts as cancelled for ``reason`` if they are in flight."""
        for group_id in group_ids:
            if (group := self._open.pop(group_id, None)) is not None:
                self._waiting_ids.difference_update(group.members)
        with self.ledger.batch():
            in_flight = [rollout_id for rollout_id in rollout_ids if self.ledger.is_open(rollout_id)]
            self.ledger.close_many(in_flight, Outcome.CANCELLED, reason)

    def cancel(self, group_id: str, reason: str) -> None:
        """Drop a group that was not finalized; its rollouts in flight, and those still to be opened, are unwanted."""
        if (group := self._open.pop(group_id, None)) is not None:
            self._waiting_ids.difference_update(group.members)
            self._remember_cut_short(group_id)
            self._cancel([name for name in group.enlisted if name not in group.members], reason)

    def lose(self, reason: str) -> None:
        """Abandon all open groups and all rollouts in flight."""
        self.abandon(self.ledger.open_ids(), group_ids=list(self._open), reason=reason)

    def waiting(self) -> list[MemberResult]:
        """The finished rollouts of open groups."""
        return [member for group in self._open.values() for member in group.members.values()]

    def take_unwanted(self) -> list[str]:
        """Rollouts that the ledger counts as cancelled and the store has yet to cancel; each is returned once."""
        unwanted, self._unwanted = self._unwanted, []
        return unwanted

    def take_requests(self) -> list[EnqueueRolloutRequest]:
        """Rollouts to enqueue: failed members again, and members that were held back. Each is returned once."""
        requests, self._requests = self._requests, []
        return requests

    def state(self) -> dict[str, Any]:
        """The groups' state, for JSON: ``waiting``: finished rollouts of open groups; ``early``: groups that were
        finalized with members in flight; ``closed``: rollouts by outcome and reason, unless the ledger is on disk."""
        waiting = self.waiting()
        closed = Counter(self.ledger.counts().reasons)
        # a restore reads, and counts, the waiting rollouts again
        closed.subtract(end for member in waiting if (end := self.ledger.outcome_of(member.rollout_id)) is not None)
        ends = [[outcome.value, reason, n] for (outcome, reason), n in closed.items() if n]
        return {
            **self.delivery.state(),
            "waiting": [member.rollout_id for member in waiting],
            "closed": None if self.ledger.on_disk else ends,
            "early": list(self._cut_short),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from ``state``. Raises ``KeyError``, ``TypeError`` or ``ValueError``, unchanged, for anything else."""
        closed = [(Outcome(outcome), reason, n) for outcome, reason, n in state["closed"] or []]
        early = dict.fromkeys(state["early"])
        with self.ledger.batch():
            self.delivery.restore(state)
            if not self.ledger.on_disk:
                self.ledger.carry_over(closed)
        self._cut_short.update(early)

    def _judge(self, group_id: str, group: _OpenGroup) -> GroupResult | None:
        if group.mode != "train":
            complete = len(group.members) >= group.size
            return self._finalize(group_id, group, reason="validation", code="validation") if complete else None
        if group.rest and len(group.members) >= group.size - len(group.rest):
            first = [member for member in group.members.values() if member.ok]
            equal = len(first) > 1 and all_equal([member.reward for member in first if member.reward is not None])
            if equal and not self.teaches(first[0].task):
                reason = f"the first {len(first)} of {group.size} rollouts have equal rewards"
                return self._finalize(group_id, group, reason=reason, code="pilot_equal")
            self._requests.extend(group.rest)
            group.rest = []
        verdict = self._verdict(group)
        if verdict.action is GroupAction.RETRY:
            if self._retry(group, verdict.retries):
                return None
            verdict = GroupVerdict(action=GroupAction.DROP, reason="not_repeatable")
        if verdict.action is GroupAction.WAIT:
            return None
        members = list(group.members.values())
        if verdict.action is GroupAction.TRAIN:
            code = self._filter([member for member in members if member.ok]) if self._filter is not None else None
            return self._finalize(group_id, group, ready=code is None, reason=code or "", code=code or "")
        code = verdict.reason or "group_incomplete"
        refusal = self._policy.refuse(size=group.size, members=members)
        sentence = refusal or f"{len(members)} of {group.size} rollouts have ended"
        reason = sentence if code == "group_incomplete" else f"{sentence} ({code})"
        return self._finalize(group_id, group, reason=reason, code=code)

    def _verdict(self, group: _OpenGroup) -> GroupVerdict:
        members = list(group.members.values())
        judge = getattr(self._policy, "judge", None)
        if judge is None:
            if len(members) < group.size:
                return GroupVerdict(action=GroupAction.WAIT)
            fit = self._policy.refuse(size=group.size, members=members) is None
            return GroupVerdict(action=GroupAction.TRAIN if fit else GroupAction.DROP)
        succeeded = sum(member.ok for member in members)
        return judge(
            GroupProgress(
                size=group.size,
                succeeded=succeeded,
                failed=len(members) - succeeded,
                retries_used=len(group.retried),
                waited_s=0.0 if group.last_end is None else self._clock() - group.last_end,
            )
        )

    def _retry(self, group: _OpenGroup, n: int) -> bool:
        """Schedule ``n`` failed members to be run repeated; ``False`` when fewer than ``n`` can be."""
        repeated = [member for member in group.members.values() if not member.ok and member.request is not None][:n]
        if len(repeated) < n:
            return False
        for member in repeated:
            del group.members[member.rollout_id]
            self._waiting_ids.discard(member.rollout_id)
            group.enlisted.pop(member.rollout_id, None)
        group.retried.extend(repeated)
        self._requests.extend(member.request for member in repeated if member.request is not None)
        return True

    def _finalize(
        self, group_id: str, group: _OpenGroup, *, ready: bool = False, reason: str, code: str
    ) -> GroupResult:
        del self._open[group_id]
        self._waiting_ids.difference_update(group.members)
        if len(group.members) < group.size:
            self._remember_cut_short(group_id)
        member = next(iter(group.members.values()))
        why = STRAGGLER_REASONS[code not in ("", "timeout")]
        late = [_straggler(name, member, why) for name in group.enlisted if name not in group.members]
        order = {name: place for place, name in enumerate(group.enlisted)}
        ended = sorted(group.members.values(), key=lambda member: order.get(member.rollout_id, len(order)))
        result = GroupResult(
            group_id=group_id,
            mode=group.mode,
            size=group.size,
            members=(*ended, *group.retried, *late),  # in the order of draw, whichever ended first
            ready=ready,
            reason=reason,
            code=code,
        )
        if group.mode != "train":
            return result
        succeeded = [member.rollout_id for member in result.succeeded]
        with self.ledger.batch():
            self._cancel([member.rollout_id for member in late], why)
            if ready:
                self.delivery.add(result)
            else:
                self.ledger.close_many(succeeded, Outcome.FILTERED, code)
                if result.instance_id is not None:
                    self.ledger.finish_instance(result.instance_id)
        return result

    def _remember_cut_short(self, group_id: str) -> None:
        self._cut_short[group_id] = None
        while len(self._cut_short) > _MAX_EARLY_GROUPS:
            self._cut_short.popitem(last=False)

    def _cancel(self, rollout_ids: list[str], reason: str) -> None:
        if rollout_ids:
            self.ledger.close_many(rollout_ids, Outcome.CANCELLED, reason)
            self._unwanted.extend(rollout_ids)


def _straggler(rollout_id: str, member: MemberResult, reason: str) -> MemberResult:
    """A rollout of ``member``'s group that was in flight when the group was finalized."""
    return MemberResult(
        rollout_id=rollout_id,
        group_id=member.group_id,
        mode=member.mode,
        group_size=member.group_size,
        failure=reason,
        failure_message="its group was finalized without it",
        outcome_if_failed=Outcome.CANCELLED,
        task=member.task,
        instance_id=member.instance_id,
    )
