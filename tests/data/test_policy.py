from __future__ import annotations

from agl_slime.data.policy import CompleteGroup, GroupAction, GroupProgress, MinimumViableGroup, RetryGroup
from agl_slime.data.results import MemberResult


def members(good: int, bad: int) -> list[MemberResult]:
    ends = [None] * good + ["timeout"] * bad
    return [MemberResult(rollout_id=f"r{n}", group_id="g", failure=failure) for n, failure in enumerate(ends)]


def test_a_complete_group_waits_for_the_last_member_and_then_needs_all():
    policy = CompleteGroup()
    assert policy.judge(GroupProgress(size=4, succeeded=2, failed=1)).action is GroupAction.WAIT
    assert policy.judge(GroupProgress(size=4, succeeded=3, failed=1)).action is GroupAction.DROP
    assert policy.judge(GroupProgress(size=4, succeeded=4)).action is GroupAction.TRAIN


def test_with_a_ratio_of_one_the_first_failure_drops_the_group():
    policy = MinimumViableGroup(min_ratio=1.0)
    verdict = policy.judge(GroupProgress(size=8, succeeded=2, failed=1))
    assert (verdict.action, verdict.reason) == (GroupAction.DROP, "floor_out_of_reach")
    assert policy.judge(GroupProgress(size=8, succeeded=2)).action is GroupAction.WAIT
    assert policy.refuse(size=2, members=members(1, 1)) is not None
    assert policy.refuse(size=2, members=members(2, 0)) is None


def test_retry_group_repeats_failures_until_its_budget_is_used():
    policy = RetryGroup(max_retries=3)
    first = policy.judge(GroupProgress(size=4, succeeded=1, failed=2))
    assert (first.action, first.retries) == (GroupAction.RETRY, 2)
    second = policy.judge(GroupProgress(size=4, succeeded=3, failed=1, retries_used=2))
    assert (second.action, second.retries) == (GroupAction.RETRY, 1)
    out_of_reach = policy.judge(GroupProgress(size=4, succeeded=2, failed=2, retries_used=2))
    assert out_of_reach.action is GroupAction.DROP  # two more are needed, one try is left: it is not wasted
    spent = policy.judge(GroupProgress(size=4, succeeded=3, failed=1, retries_used=3))
    assert (spent.action, spent.reason) == (GroupAction.DROP, "retries_exhausted")
    assert policy.judge(GroupProgress(size=4, succeeded=4, retries_used=3)).action is GroupAction.TRAIN


def test_a_minimum_viable_group_trains_on_its_survivors():
    policy = MinimumViableGroup(min_ratio=0.7)
    assert policy.judge(GroupProgress(size=8, succeeded=6, failed=2)).action is GroupAction.TRAIN
    assert policy.judge(GroupProgress(size=8, succeeded=4, failed=1)).action is GroupAction.WAIT
    assert policy.judge(GroupProgress(size=8, succeeded=2, failed=3)).reason == "floor_out_of_reach"
    assert policy.refuse(size=8, members=members(6, 2)) is None
    assert policy.refuse(size=8, members=members(5, 3)) is not None


def test_minimum_viable_group_retries_only_as_needed():
    policy = MinimumViableGroup(min_ratio=0.5, max_retries=2)
    verdict = policy.judge(GroupProgress(size=8, succeeded=3, failed=5))
    assert (verdict.action, verdict.retries) == (GroupAction.RETRY, 1)
    out_of_reach = policy.judge(GroupProgress(size=8, succeeded=1, failed=7))
    assert out_of_reach.action is GroupAction.DROP  # three more are needed, two tries are left: none is wasted


def test_a_late_group_is_used_at_the_floor_and_dropped_below_it():
    policy = MinimumViableGroup(min_ratio=0.5, timeout_s=300)
    assert policy.judge(GroupProgress(size=8, succeeded=5, waited_s=300)).action is GroupAction.WAIT
    assert policy.judge(GroupProgress(size=8, succeeded=5, waited_s=300.1)).action is GroupAction.TRAIN
    assert policy.judge(GroupProgress(size=8, succeeded=3, waited_s=300.1)).action is GroupAction.DROP


def test_the_floor_is_not_moved_by_binary_fractions():
    assert MinimumViableGroup(min_ratio=0.07, min_members=1).floor(100) == 7
    assert MinimumViableGroup(min_ratio=0.7).floor(8) == 6
    assert MinimumViableGroup().floor(1) == 1
