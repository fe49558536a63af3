"""Groups settle once, when their last member has ended, whatever the order of the reports."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.groups.assembler import GroupAssembler
from agl_slime.groups.outcome import GroupResult, MemberResult
from agl_slime.groups.policy import CompleteGroup, GroupPolicy, MinimumViableGroup


def member(name: str, group: str = "g", *, failure: str | None = None, mode: str = "train") -> MemberResult:
    return MemberResult(rollout_id=name, group_id=group, mode=mode, failure=failure, reward=None if failure else 1.0)


def assembler(policy: GroupPolicy | None = None) -> GroupAssembler:
    return GroupAssembler(policy=policy or CompleteGroup())


def test_a_group_settles_with_its_last_member() -> None:
    groups = assembler()
    groups.announce("g", size=2)
    assert groups.add(member("a")) is None
    assert [waiting.rollout_id for waiting in groups.members_waiting()] == ["a"]
    settled = groups.add(member("b"))
    assert settled is not None
    assert settled.ready
    assert [one.rollout_id for one in settled.members] == ["a", "b"]
    assert len(groups) == 0
    assert groups.members_waiting() == []


def test_a_member_that_is_reported_twice_counts_once() -> None:
    groups = assembler()
    groups.announce("g", size=2)
    assert groups.add(member("a")) is None
    assert groups.add(member("a", failure="timeout")) is None
    settled = groups.add(member("b"))
    assert settled is not None
    assert settled.ready


def test_a_second_announcement_changes_nothing() -> None:
    groups = assembler()
    groups.announce("g", size=1)
    groups.announce("g", size=5)
    assert groups.add(member("a")) is not None


def test_a_group_that_nobody_announced_has_the_default_size() -> None:
    groups = assembler()
    assert groups.add(member("a"), default_size=2) is None
    settled = groups.add(member("b"), default_size=7)
    assert settled is not None
    assert settled.size == 2


def test_failed_members_settle_a_group_that_is_then_dropped_with_the_reason() -> None:
    groups = assembler(MinimumViableGroup(min_ratio=0.7))
    groups.announce("g", size=4)
    for name in "abc":
        groups.add(member(name, failure="timeout" if name != "a" else None))
    settled = groups.add(member("d"))
    assert settled is not None
    assert not settled.ready
    assert settled.reason == "2 of 4 rollouts succeeded, 3 are needed"
    assert [one.rollout_id for one in settled.succeeded] == ["a", "d"]


def test_validation_groups_are_never_ready() -> None:
    groups = assembler()
    groups.announce("v", size=1, mode="val")
    settled = groups.add(member("a", "v", mode="val"))
    assert settled is not None
    assert (settled.ready, settled.mode, settled.reason) == (False, "val", "validation")


def test_what_was_announced_counts_and_not_what_a_member_says() -> None:
    groups = assembler()
    groups.announce("v", size=1, mode="val")
    settled = groups.add(member("a", "v", mode="train"))
    assert settled is not None
    assert not settled.ready


def test_clear_forgets_what_has_not_settled() -> None:
    groups = assembler()
    groups.announce("g", size=2)
    groups.add(member("a"))
    groups.clear()
    assert len(groups) == 0


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    announced=st.sets(st.integers(0, 5)),
    failing=st.sets(st.integers(0, 29)),
    seed=st.integers(0, 2**32),
    policy=st.sampled_from([CompleteGroup(), MinimumViableGroup(min_ratio=0.5, min_members=1)]),
)
@settings(deadline=None)
def test_every_rollout_is_in_exactly_one_result_whatever_the_order(
    sizes: list[int], announced: set[int], failing: set[int], seed: int, policy: GroupPolicy
) -> None:
    members = [(f"g{group}", size, f"r{group}-{number}") for group, size in enumerate(sizes) for number in range(size)]
    failed = {name for index, (_, _, name) in enumerate(members) if index in failing}
    groups = assembler(policy)
    for group in announced & set(range(len(sizes))):
        groups.announce(f"g{group}", size=sizes[group])
    reports = members + random.Random(seed).sample(members, k=len(members) // 2)
    random.Random(seed + 1).shuffle(reports)
    settled: list[GroupResult] = []
    ended: set[str] = set()
    for group_id, size, name in reports:
        if name in ended and group_id in {group.group_id for group in settled}:
            continue  # the ledger keeps reports of rollouts that have ended from getting here
        ended.add(name)
        result = groups.add(member(name, group_id, failure="boom" if name in failed else None), default_size=size)
        if result is not None:
            settled.append(result)
    assert sorted(one.rollout_id for group in settled for one in group.members) == sorted(name for _, _, name in members)
    assert len(groups) <= len(announced)
    assert groups.members_waiting() == []
    for group in settled:
        assert len(group.members) == group.size
        assert group.ready is (policy.refuse(size=group.size, members=group.members) is None)
        assert {one.rollout_id for one in group.succeeded} == {one.rollout_id for one in group.members} - failed


@pytest.mark.parametrize("late", [1, 3])
def test_members_beyond_the_size_make_a_new_group_that_waits(late: int) -> None:
    groups = assembler()
    groups.announce("g", size=1)
    assert groups.add(member("a")) is not None
    for number in range(late):
        groups.add(member(f"late-{number}"), default_size=10)
    assert len(groups.members_waiting()) == late
