"""Groups are finalized once, when their last member has ended, whatever the order of the reports."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.data.assembler import GroupAssembler
from agl_slime.data.policy import CompleteGroup, GroupPolicy, MinimumViableGroup, RetryGroup, zero_variance
from agl_slime.data.results import GroupResult, MemberResult, Outcome
from agl_slime.support.agl import EnqueueRolloutRequest, Rollout


def member(name: str, group: str = "g", *, failure: str | None = None, mode: str = "train") -> MemberResult:
    return MemberResult(rollout_id=name, group_id=group, mode=mode, failure=failure, reward=None if failure else 1.0)


def enlist(groups: GroupAssembler, group_id: str, rollout_id: str) -> bool:
    """Open a member; ``False`` when its group was finalized without it, so that it is to be cancelled."""
    groups.opened([Rollout(rollout_id=rollout_id, input={}, start_time=0.0, metadata={"group_id": group_id})])
    return rollout_id not in groups.take_unwanted()


def add(groups: GroupAssembler, member: MemberResult, *, default_size: int = 1) -> GroupResult | None:
    taken = groups.add(member, default_size=default_size)
    return taken[1] if taken is not None else None


def finalized(groups: GroupAssembler, *members: MemberResult, default_size: int = 1) -> GroupResult:
    """The group that the last of ``members``, and none before it, finalizes."""
    results = [add(groups, member, default_size=default_size) for member in members]
    assert [result is None for result in results] == [True] * (len(members) - 1) + [False]
    assert results[-1] is not None
    return results[-1]


def names(members: Sequence[MemberResult]) -> list[str]:
    return [member.rollout_id for member in members]


def assembler(policy: GroupPolicy | None = None) -> GroupAssembler:
    return GroupAssembler(policy=policy or CompleteGroup())


def test_late_group_is_finalized_with_its_members_at_the_timeout() -> None:
    now = [0.0]
    groups = GroupAssembler(policy=MinimumViableGroup(min_ratio=0.5, timeout_s=10), clock=lambda: now[0])
    for name in ("used", "dropped", "not begun"):
        groups.announce(name, size=4)
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
    assert (used.group_id, used.ready, names(used.succeeded)) == ("used", True, ["a", "b"])
    assert names([member for member in used.members if member.failure == "group_timeout"]) == ["c", "d"]
    now[0] = 1000.0
    assert groups.late() == []
    assert len(groups) == 1


def test_a_failed_member_that_cannot_be_enqueued_again_ends_its_group() -> None:
    groups = assembler(RetryGroup(max_retries=2))
    groups.announce("g", size=2)
    result = finalized(groups, member("a", failure="cancelled"))
    assert (result.ready, result.code) == (False, "not_repeatable")
    assert groups.take_requests() == []


@pytest.mark.parametrize(
    ("rewards", "teaches", "end"),
    [([1, 1], False, "pilot_equal"), ([1, 1], True, ""), ([0, 1], False, ""), ([None, 1], False, "")],
)
def test_a_pilot_is_dropped_if_its_rewards_are_equal(rewards: list[float | None], teaches: bool, end: str) -> None:
    groups = assembler(MinimumViableGroup(min_ratio=0.5))
    groups.teaches = lambda task: teaches
    groups.announce("g", size=4)
    rest = [EnqueueRolloutRequest(input={}) for _ in range(2)]
    groups.hold_back("g", rest)
    ends = [replace(member(f"p{n}", failure=None if r is not None else "x"), reward=r) for n, r in enumerate(rewards)]
    assert add(groups, ends[0]) is None
    result = add(groups, ends[1])
    assert (result.code if result else "") == end
    assert groups.take_requests() == ([] if end else rest)
    counts = groups.ledger.counts()
    if end:
        assert counts.reasons == {(Outcome.FILTERED, "pilot_equal"): 2}
    else:
        assert finalized(groups, member("c"), member("d")).ready
    assert counts.opened == counts.open + counts.ready + sum(counts.closed.values())


@pytest.mark.parametrize(
    ("rewards", "word"), [([1.0], None), ([], None), ([0.5, 0.5 + 1e-9], "zero_variance"), ([0.0, 1e-3], None)]
)
def test_one_reward_has_no_variance_to_miss(rewards: list[float], word: str | None) -> None:
    assert zero_variance([replace(member(str(n)), reward=reward) for n, reward in enumerate(rewards)]) == word


def test_loss_forgets_unfinished_groups() -> None:
    groups = assembler()
    groups.announce("g", size=2)
    add(groups, member("a"))
    groups.lose("gone")
    assert len(groups) == 0


POLICIES = [
    CompleteGroup(),
    MinimumViableGroup(min_ratio=1.0),
    RetryGroup(max_retries=2),
    MinimumViableGroup(min_ratio=0.5, min_members=1),
]


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    announced=st.sets(st.integers(0, 5)),
    failing=st.sets(st.integers(0, 29)),
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(POLICIES),
)
@settings(deadline=None)
def test_every_group_is_finalized_once_and_every_rollout_is_in_its_result(sizes, announced, failing, seed, policy):
    """In any order, with repeated reports, unannounced groups, retries that succeed, and groups without stragglers."""
    members = [(f"g{group}", size, f"r{group}-{number}") for group, size in enumerate(sizes) for number in range(size)]
    failed = {name for index, (_, _, name) in enumerate(members) if index in failing}
    groups = assembler(policy)
    named = {f"g{group}" for group in announced if group < len(sizes)}
    for group_id in named:
        groups.announce(group_id, size=sizes[int(group_id[1:])])
        groups.announce(group_id, size=9)  # changes nothing
    for group_id, _, name in members:
        enlist(groups, group_id, name)
    reports = members + random.Random(seed).sample(members, k=len(members) // 2)
    random.Random(seed + 1).shuffle(reports)
    results: list[GroupResult] = []
    ended: set[str] = set()
    retried: set[str] = set()
    while reports:
        group_id, size, name = reports.pop()
        if name in ended:
            continue  # the ledger keeps reports of rollouts that have ended from getting here
        ended.add(name)
        report = replace(member(name, group_id, failure="boom" if name in failed else None), request=(group_id, name))  # type: ignore[arg-type]
        result = add(groups, report, default_size=size)
        if result is not None:
            results.append(result)
        for group_id, name in groups.take_requests():  # type: ignore[misc]
            retried.add(name)
            assert enlist(groups, group_id, name + "-again")
            reports.insert(0, (group_id, size, name + "-again"))
    assert len({group.group_id for group in results}) == len(results) == len(sizes)
    assert (len(groups), groups.waiting()) == (0, [])
    for group in results:
        in_group = names(group.members)
        assert len(set(in_group)) == len(in_group)
        if group.group_id in named:  # also when it was finalized without some
            assert {name for group_id, _, name in members if group_id == group.group_id} <= set(in_group)
        assert failed.isdisjoint(names(group.succeeded))
        retries = len(retried.intersection(in_group))
        assert retries <= (policy.max_retries if isinstance(policy, RetryGroup) else 0)
        if group.ready:
            assert policy.refuse(size=group.size, members=group.succeeded) is None
        elif not isinstance(policy, MinimumViableGroup):
            assert failed.intersection(in_group)


@pytest.mark.parametrize("late", [1, 3])
def test_members_beyond_the_size_make_a_new_group_that_waits(late: int) -> None:
    groups = assembler()
    groups.announce("g", size=1)
    assert finalized(groups, member("a"))
    for number in range(late):
        add(groups, member(f"late-{number}"), default_size=10)
    assert len(groups.waiting()) == late
