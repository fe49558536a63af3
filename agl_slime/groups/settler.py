"""What becomes of rollouts that end: their groups settle, the ledger knows, and what is fit to train on waits in order.

Bookkeeping only: no threads, no store. A data source calls it under its lock, and does in the store what it asks for:
``take_unwanted`` (to be cancelled) and ``take_retries`` (to be enqueued again).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from agl_slime.datasource.state import DataSourceState
from agl_slime.groups.assembler import GroupAssembler, GroupFilter
from agl_slime.groups.ledger import Ledger, RolloutLedger
from agl_slime.groups.policy import GroupPolicy
from agl_slime.groups.ready import ReadyGroup, ReadyGroups
from agl_slime.groups.results import CUT_OFF, GroupResult, MemberResult, Outcome, instance_of
from agl_slime.groups.staleness import PolicyVersion, versions_of
from agl_slime.support.agl import Rollout
from agl_slime.types import Sample, set_rollout_id


class GroupSettler:
    """Groups from their announcement to their hand-out. Not thread-safe.

    Args:
        policy, group_filter: when a group is fit to train on, and whether it is worth it.
        max_staleness: most versions that tokens may be behind the policy; ``None`` is any number.
        ledger: the account of every rollout.
    """

    def __init__(
        self,
        *,
        policy: GroupPolicy,
        group_filter: GroupFilter | None = None,
        max_staleness: int | None = None,
        ledger: RolloutLedger | None = None,
    ) -> None:
        self.ledger: RolloutLedger = ledger if ledger is not None else Ledger()
        self.assembler = GroupAssembler(policy=policy, group_filter=group_filter)
        self.version = PolicyVersion(max_staleness=max_staleness)
        self.ready = ReadyGroups()
        self.outdated = 0
        """Groups that were ready and became too old."""
        self._unwanted: list[str] = []
        self._next_index = 0
        self._next_group_index = 0
        self._next_rollout_number = 0

    # -- on the way ---------------------------------------------------------------------------------------------------

    def opened(self, rollouts: Sequence[Rollout | str]) -> None:
        """These rollouts are in flight. Those that come as rollouts, and not as ids alone, are members that their group
        can settle without."""
        self.ledger.open_many([_name_and_instance(rollout) for rollout in rollouts])
        late: list[str] = []
        for rollout in rollouts:
            group_id = None if isinstance(rollout, str) else (rollout.metadata or {}).get("group_id")
            if (
                group_id is not None
                and not isinstance(rollout, str)
                and not self.assembler.enlist(str(group_id), rollout.rollout_id)
            ):
                late.append(rollout.rollout_id)
        self._let_go(late, "group_settled")

    def settle(self, member: MemberResult, *, default_size: int) -> tuple[MemberResult, GroupResult | None] | None:
        """Take a rollout that has ended in. Returns it as it counts (it may be too old), with its group when that has
        settled; ``None`` for a rollout that has ended before, or whose group settled without it."""
        with self.ledger.batch():
            self.ledger.open(
                member.rollout_id, instance_id=member.instance_id
            )  # a rollout that nobody announced is opened by its end
            if not self.ledger.is_open(member.rollout_id) or self.assembler.holds(member.rollout_id):
                return None  # reported twice
            if self.assembler.settled_early(member.group_id):
                self.ledger.close(member.rollout_id, Outcome.CANCELLED, "group_settled")
                return None
            member = self._check_age(member)
            group = self.assembler.add(member, default_size=default_size)
            if not member.ok:
                self.ledger.close(member.rollout_id, member.outcome_if_failed, member.failure or "")
            elif member.mode != "train":
                self.ledger.close(member.rollout_id, Outcome.VALIDATED)
            if group is not None:
                self._settled(group)
        return member, group

    def late(self) -> list[GroupResult]:
        """The groups that settle because time has passed."""
        groups = self.assembler.late()
        with self.ledger.batch():
            for group in groups:
                self._settled(group)
        return groups

    def advance(self, versions: Iterable[str | int]) -> None:
        """The policy has one of these versions, at least. Groups that are too old for it are not handed out any more."""
        news = [self.version.advance(version) for version in versions]
        stale = self.ready.remove(self.version.too_old) if any(news) else []
        with self.ledger.batch():
            for group in stale:
                self.ledger.close_many(group.rollout_ids, Outcome.STALE, "waited_too_long")
                self._finish(group.instance_id)
        self.outdated += len(stale)

    def hand_out(self, n: int) -> list[list[Sample]]:
        """Up to ``n`` groups to train on, oldest first."""
        groups = self.ready.take(n)
        with self.ledger.batch():
            for group in groups:
                if self.ledger.close_many(
                    group.rollout_ids, Outcome.TRAINED
                ):  # not when it was given back and comes again
                    self._finish(group.instance_id)
        return [group.samples for group in groups]

    def abandon(self, rollout_ids: Iterable[str], *, group_ids: Iterable[str] = (), reason: str) -> None:
        """These rollouts are cancelled for ``reason``, if they are in flight, and these groups will not settle."""
        self.assembler.forget(group_ids)
        with self.ledger.batch():
            self.ledger.close_many(
                [rollout_id for rollout_id in rollout_ids if self.ledger.is_open(rollout_id)], Outcome.CANCELLED, reason
            )

    def lose(self, reason: str) -> None:
        """All that is in flight, and all that waits for it, is lost."""
        lost = dict.fromkeys(
            [*(member.rollout_id for member in self.assembler.members_waiting()), *self.ledger.open_ids()]
        )
        self.ledger.close_many(list(lost), Outcome.CANCELLED, reason)
        self.assembler.clear()

    def take_unwanted(self) -> list[str]:
        """Rollouts that are cancelled in the ledger, and still to be cancelled in the store; each once."""
        unwanted, self._unwanted = self._unwanted, []
        return unwanted

    def placeholders(self, n: int, size: int) -> list[list[Sample]]:
        """Groups of unsampled (PENDING) samples: what slime's own data source gives without a data set."""
        first, self._next_group_index = self._next_group_index, self._next_group_index + n
        return [
            [Sample(group_index=group, index=group * size + member) for member in range(size)]
            for group in range(first, first + n)
        ]

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> DataSourceState:
        """Where the groups stand."""
        groups = self.ready.groups
        return DataSourceState(
            groups=[[sample.to_dict() for sample in group.samples] for group in groups],
            members=[group.rollout_ids for group in groups],
            instances=[group.instance_id for group in groups],
            waiting=list(dict.fromkeys(member.rollout_id for member in self.assembler.members_waiting())),
            index=self._next_index,
            group_index=self._next_group_index,
            rollout_number=self._next_rollout_number,
            closed=self._closed() if isinstance(self.ledger, Ledger) else None,
            early=self.assembler.early,
            version=self.version.newest,
        )

    def restore(self, state: DataSourceState) -> None:
        """Go on from ``state``; raises ``KeyError``, ``TypeError`` or ``ValueError`` when it is none, and then nothing
        has changed."""
        n = len(state.groups)
        groups = [
            ReadyGroup([Sample.from_dict(sample) for sample in samples], members, instance_id)
            for samples, members, instance_id in zip(
                state.groups, state.members or [[]] * n, state.instances or [None] * n, strict=True
            )
        ]
        closed = [(Outcome(outcome), reason, n) for outcome, reason, n in state.closed or []]
        self.ledger.remember(state.ended or [])
        if isinstance(self.ledger, Ledger):
            self.ledger.carry_over(closed)
        with self.ledger.batch():
            for group in groups:
                self.ready.put(group)
                self.ledger.open_many([(rollout_id, group.instance_id) for rollout_id in group.rollout_ids])
                self.ledger.ready_many(group.rollout_ids)
        self.version.advance(state.version)
        self.assembler.remember_early(state.early or [])
        self._next_index = max(self._next_index, state.index)
        self._next_group_index = max(self._next_group_index, state.group_index)
        self._next_rollout_number = max(self._next_rollout_number, state.rollout_number)

    # -- internals ----------------------------------------------------------------------------------------------------

    def _check_age(self, member: MemberResult) -> MemberResult:
        """The member, as a failure when it was sampled by weights that are too old."""
        if not member.ok or member.mode != "train":
            return member
        self.advance(versions_of(member.samples))
        if not self.version.too_old(member.samples):
            return member
        message = (
            f"{self.version.lag(member.samples)} versions behind the policy, {self.version.max_staleness} are allowed"
        )
        return replace(member, failure="stale", failure_message=message, outcome_if_failed=Outcome.STALE, samples=())

    def _settled(self, group: GroupResult) -> None:
        if group.mode != "train":
            return
        for reason in CUT_OFF:
            self._let_go([member.rollout_id for member in group.members if member.failure == reason], reason)
        if not group.ready:
            self.ledger.close_many([member.rollout_id for member in group.succeeded], Outcome.FILTERED, group.code)
            self._finish(group.instance_id)
            return
        samples: list[Sample] = []
        for member in group.succeeded:
            for sample in member.samples:
                sample.group_index = self._next_group_index
                sample.index = self._next_index
                if group.instance_id is not None:
                    sample.metadata["instance_id"] = group.instance_id
                set_rollout_id(sample, self._next_rollout_number)
                self._next_index += 1
                samples.append(sample)
            self._next_rollout_number += 1
        rollout_ids = [member.rollout_id for member in group.succeeded]
        self.ledger.ready_many(rollout_ids)
        self._next_group_index += 1
        self.ready.put(ReadyGroup(samples, rollout_ids, group.instance_id))

    def _let_go(self, rollout_ids: list[str], reason: str) -> None:
        """Rollouts that nobody waits for any more."""
        if rollout_ids:
            self.ledger.close_many(rollout_ids, Outcome.CANCELLED, reason)
            self._unwanted.extend(rollout_ids)

    def _finish(self, instance_id: str | None) -> None:
        if instance_id is not None:
            self.ledger.finish_instance(instance_id)

    def _closed(self) -> list[list[Any]]:
        closed = Counter(self.ledger.counts().reasons)
        for (
            member
        ) in self.assembler.members_waiting():  # which are read, and counted, once more when the state is loaded
            if not member.ok:
                closed[member.outcome_if_failed, member.failure or ""] -= 1
            elif member.mode != "train":
                closed[Outcome.VALIDATED, ""] -= 1
        return [[outcome.value, reason, n] for (outcome, reason), n in closed.items() if n]


def _name_and_instance(rollout: Rollout | str) -> tuple[str, str | None]:
    if isinstance(rollout, str):
        return rollout, None
    return rollout.rollout_id, instance_of(rollout.metadata or {})
