"""Groups settle once, when their last member has ended, whatever the order of the reports."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.data.assembler import GroupAssembler
from agl_slime.data.policy import (
    CompleteGroup,
    GroupPolicy,
    MinimumViableGroup,
    RetryGroup,
    zero_variance,
)
from agl_slime.data.results import GroupResult, MemberResult, Outcome
from agl_slime.support.agl import Rollout


def member(name: str, group: str = "g", *, failure: str | None = None, mode: str = "train") -> MemberResult:
    return MemberResult(rollout_id=name, group_id=group, mode=mode, failure=failure, reward=None if failure else 1.0)


def enlist(groups: GroupAssembler, group_id: str, rollout_id: str) -> bool:
    """Open a member; ``False`` when its group was finalized without it, so that it is to be cancelled."""
    groups.opened([Rollout(rollout_id=rollout_id, input={}, start_time=0.0, metadata={"group_id": group_id})])
    return rollout_id not in groups.take_unwanted()


def add(groups: GroupAssembler, member: MemberResult, *, default_size: int = 1) -> GroupResult | None:
    taken = groups.add(member, default_size=default_size)
    return taken[1] if taken is not None else None


def assembler(policy: GroupPolicy | None = None) -> GroupAssembler:
    return GroupAssembler(policy=policy or CompleteGroup())


def test_a_group_settles_with_its_last_member() -> None:
    groups = assembler()
    groups.announce("g", size=2)
    assert add(groups, member("a")) is None
    assert [waiting.rollout_id for waiting in groups.waiting()] == ["a"]
    settled = add(groups, member("b"))
    assert settled is not None
    assert settled.ready
    assert [one.rollout_id for one in settled.members] == ["a", "b"]
    assert len(groups) == 0
    assert groups.waiting() == []


def test_a_member_that_is_reported_twice_counts_once() -> None:
    groups = assembler()
    groups.announce("g", size=2)
    assert add(groups, member("a")) is None
    assert groups.has_ended("a")
    assert add(groups, member("a", failure="timeout")) is None
    settled = add(groups, member("b"))
    assert settled is not None
    assert settled.ready


def test_a_second_announcement_changes_nothing() -> None:
    groups = assembler()
    groups.announce("g", size=1)
    groups.announce("g", size=5)
    assert add(groups, member("a")) is not None


def test_unannounced_group_has_the_default_size() -> None:
    groups = assembler()
    assert add(groups, member("a"), default_size=2) is None
    settled = add(groups, member("b"), default_size=7)
    assert settled is not None
    assert settled.size == 2


def test_a_group_is_dropped_as_soon_as_it_cannot_be_saved() -> None:
    groups = assembler(MinimumViableGroup(min_ratio=0.7))
    groups.announce("g", size=4)
    for name in "abcd":
        assert enlist(groups, "g", name)
    assert add(groups, member("a")) is None
    assert add(groups, member("b", failure="timeout")) is None
    settled = add(groups, member("c", failure="timeout"))
    assert settled is not None
    assert (settled.ready, settled.code) == (False, "floor_out_of_reach")
    assert settled.reason == "1 of 4 rollouts succeeded, 3 are needed (floor_out_of_reach)"
    assert [one.rollout_id for one in settled.succeeded] == ["a"]
    assert [(one.rollout_id, one.outcome_if_failed) for one in settled.members if one.straggler] == [
        ("d", Outcome.CANCELLED)
    ]
    assert add(groups, member("d")) is None
    assert not enlist(groups, "g", "e")
    assert len(groups) == 0


@pytest.mark.parametrize("policy", [CompleteGroup(), MinimumViableGroup(min_ratio=1.0, drop_early=False)])
def test_patient_group_with_failed_members_is_dropped_with_the_reason(policy: GroupPolicy) -> None:
    groups = assembler(policy)
    groups.announce("g", size=3)
    add(groups, member("a"))
    add(groups, member("b", failure="timeout"))
    settled = add(groups, member("c"))
    assert settled is not None
    assert (settled.ready, settled.reason, settled.code) == (
        False,
        policy.refuse(size=3, members=settled.members),
        "group_incomplete",
    )
    assert groups.state()["early"] == []


def test_late_group_settles_with_its_members_at_the_timeout() -> None:
    now = [0.0]
    groups = GroupAssembler(policy=MinimumViableGroup(min_ratio=0.5, timeout_s=10), clock=lambda: now[0])
    groups.announce("used", size=4)
    groups.announce("dropped", size=4)
    groups.announce("not begun", size=4)
    for name in "abcd":
        enlist(groups, "used", name)
    add(groups, member("a", "used"))
    add(groups, member("x", "dropped"))
    now[0] = 5.0
    add(groups, member("b", "used"))
    now[0] = 10.5
    [dropped] = groups.late()
    assert (dropped.group_id, dropped.ready, dropped.code) == ("dropped", False, "timeout")
    now[0] = 15.5
    [used] = groups.late()
    assert (used.group_id, used.ready) == ("used", True)
    assert [one.rollout_id for one in used.succeeded] == ["a", "b"]
    assert [one.rollout_id for one in used.members if one.failure == "group_timeout"] == ["c", "d"]
    now[0] = 1000.0
    assert groups.late() == []
    assert len(groups) == 1


def test_failed_members_are_run_again_under_the_same_group() -> None:
    groups = assembler(RetryGroup(max_retries=2))
    groups.announce("g", size=2)
    again = replace(member("a", failure="boom"), request="once more")  # type: ignore[arg-type]
    assert add(groups, again) is None
    assert groups.take_retries() == [again]
    assert groups.take_retries() == []
    assert enlist(groups, "g", "a2")
    assert add(groups, member("b")) is None
    settled = add(groups, member("a2"))
    assert settled is not None
    assert settled.ready
    assert [one.rollout_id for one in settled.members] == ["b", "a2", "a"]
    assert [one.rollout_id for one in settled.succeeded] == ["b", "a2"]


def test_member_that_cannot_be_repeated_drops_the_group() -> None:
    groups = assembler(RetryGroup(max_retries=2))
    groups.announce("g", size=2)
    settled = add(groups, member("a", failure="cancelled"))
    assert settled is not None
    assert (settled.ready, settled.code) == (False, "not_repeatable")
    assert groups.take_retries() == []


def test_filter_drops_groups_that_the_policy_would_train_on() -> None:
    groups = GroupAssembler(policy=MinimumViableGroup(min_ratio=0.5), group_filter=zero_variance)
    groups.announce("same", size=2)
    add(groups, member("a", "same"))
    same = add(groups, member("b", "same"))
    assert same is not None
    assert (same.ready, same.code, same.reason) == (False, "zero_variance", "zero_variance")
    groups.announce("differs", size=3)
    add(groups, member("c", "differs"))
    add(groups, replace(member("d", "differs"), reward=0.0))
    differs = add(groups, member("e", "differs", failure="boom"))
    assert differs is not None
    assert differs.ready


@pytest.mark.parametrize(
    ("rewards", "word"), [([1.0], None), ([], None), ([0.5, 0.5 + 1e-9], "zero_variance"), ([0.0, 1e-3], None)]
)
def test_one_reward_has_no_variance_to_miss(rewards: list[float], word: str | None) -> None:
    assert zero_variance([replace(member(str(n)), reward=reward) for n, reward in enumerate(rewards)]) == word


def test_validation_groups_are_never_ready() -> None:
    groups = assembler()
    groups.announce("v", size=1, mode="val")
    settled = add(groups, member("a", "v", mode="val"))
    assert settled is not None
    assert (settled.ready, settled.mode, settled.reason) == (False, "val", "validation")


def test_announcement_overrides_what_a_member_claims() -> None:
    groups = assembler()
    groups.announce("v", size=1, mode="val")
    settled = add(groups, member("a", "v", mode="train"))
    assert settled is not None
    assert not settled.ready


def test_loss_forgets_unsettled_groups() -> None:
    groups = assembler()
    groups.announce("g", size=2)
    add(groups, member("a"))
    groups.lose("gone")
    assert len(groups) == 0


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    announced=st.sets(st.integers(0, 5)),
    failing=st.sets(st.integers(0, 29)),
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(
        [
            CompleteGroup(),
            MinimumViableGroup(min_ratio=1.0),
            RetryGroup(max_retries=2),
            MinimumViableGroup(min_ratio=0.5, min_members=1),
        ]
    ),
)
@settings(deadline=None)
def test_every_group_settles_once_and_every_rollout_is_in_its_result(
    sizes: list[int], announced: set[int], failing: set[int], seed: int, policy: GroupPolicy
) -> None:
    """In any order, with repeated reports, unannounced groups, retries that succeed and groups that settle early."""
    members = [(f"g{group}", size, f"r{group}-{number}") for group, size in enumerate(sizes) for number in range(size)]
    failed = {name for index, (_, _, name) in enumerate(members) if index in failing}
    groups = assembler(policy)
    named = {f"g{group}" for group in announced if group < len(sizes)}
    for group_id in named:
        groups.announce(group_id, size=sizes[int(group_id[1:])])
    for group_id, _, name in members:
        enlist(groups, group_id, name)
    reports = members + random.Random(seed).sample(members, k=len(members) // 2)
    random.Random(seed + 1).shuffle(reports)
    settled: list[GroupResult] = []
    ended: set[str] = set()
    retried: set[str] = set()
    while reports:
        group_id, size, name = reports.pop()
        if name in ended:
            continue  # the ledger keeps reports of rollouts that have ended from getting here
        ended.add(name)
        report = replace(member(name, group_id, failure="boom" if name in failed else None), request="again")  # type: ignore[arg-type]
        result = add(groups, report, default_size=size)
        if result is not None:
            settled.append(result)
        for again in groups.take_retries():
            retried.add(again.rollout_id)
            assert enlist(groups, again.group_id, again.rollout_id + "-again")
            reports.insert(0, (again.group_id, size, again.rollout_id + "-again"))
    assert len({group.group_id for group in settled}) == len(settled) == len(sizes)
    assert len(groups) == 0
    assert groups.waiting() == []
    for group in settled:
        names = [one.rollout_id for one in group.members]
        assert len(set(names)) == len(names)
        if group.group_id in named:
            assert {name for group_id, _, name in members if group_id == group.group_id} <= set(names), (
                "also when it settled without some"
            )
        assert {one.rollout_id for one in group.succeeded}.isdisjoint(failed)
        retries = sum(one.rollout_id in retried for one in group.members)
        assert retries <= (policy.max_retries if isinstance(policy, RetryGroup) else 0)
        if group.ready:
            assert policy.refuse(size=group.size, members=group.succeeded) is None
        elif not isinstance(policy, MinimumViableGroup):
            assert any(one.rollout_id in failed for one in group.members)


@pytest.mark.parametrize("late", [1, 3])
def test_members_beyond_the_size_make_a_new_group_that_waits(late: int) -> None:
    groups = assembler()
    groups.announce("g", size=1)
    assert add(groups, member("a")) is not None
    for number in range(late):
        add(groups, member(f"late-{number}"), default_size=10)
    assert len(groups.waiting()) == late
