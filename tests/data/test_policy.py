from typing import Any

import pytest

from agl_slime.data.policy import CompleteGroup, GroupAction, GroupProgress, MinimumViableGroup, RetryGroup
from agl_slime.data.results import MemberResult


def members(good: int, bad: int) -> list[MemberResult]:
    ends = [None] * good + ["timeout"] * bad
    return [MemberResult(rollout_id=f"r{n}", group_id="g", failure=failure) for n, failure in enumerate(ends)]


WAIT, TRAIN, DROP = GroupAction.WAIT, GroupAction.TRAIN, GroupAction.DROP
RETRY = RetryGroup(max_retries=3)
VIABLE = MinimumViableGroup(min_ratio=0.7)
RETRIES = MinimumViableGroup(min_ratio=0.5, max_retries=2)
PATIENT = MinimumViableGroup(min_ratio=0.5, timeout_s=300)


@pytest.mark.parametrize(
    ("policy", "progress", "verdict"),
    [
        (CompleteGroup(), GroupProgress(size=4, succeeded=2, failed=1), WAIT),
        (CompleteGroup(), GroupProgress(size=4, succeeded=3, failed=1), DROP),
        (CompleteGroup(), GroupProgress(size=4, succeeded=4), TRAIN),
        (MinimumViableGroup(min_ratio=1.0), GroupProgress(size=8, succeeded=2, failed=1), "floor_out_of_reach"),
        (MinimumViableGroup(min_ratio=1.0), GroupProgress(size=8, succeeded=2), WAIT),
        (RETRY, GroupProgress(size=4, succeeded=1, failed=2), 2),
        (RETRY, GroupProgress(size=4, succeeded=3, failed=1, retries_used=2), 1),
        (RETRY, GroupProgress(size=4, succeeded=2, failed=2, retries_used=2), DROP),  # two are needed, one try is left
        (RETRY, GroupProgress(size=4, succeeded=3, failed=1, retries_used=3), "retries_exhausted"),
        (RETRY, GroupProgress(size=4, succeeded=4, retries_used=3), TRAIN),
        (VIABLE, GroupProgress(size=8, succeeded=6, failed=2), TRAIN),
        (VIABLE, GroupProgress(size=8, succeeded=4, failed=1), WAIT),
        (VIABLE, GroupProgress(size=8, succeeded=2, failed=3), "floor_out_of_reach"),
        (RETRIES, GroupProgress(size=8, succeeded=3, failed=5), 1),
        (RETRIES, GroupProgress(size=8, succeeded=1, failed=7), DROP),  # three are needed, two tries are left
        (PATIENT, GroupProgress(size=8, succeeded=5, waited_s=300), WAIT),
        (PATIENT, GroupProgress(size=8, succeeded=5, waited_s=300.1), TRAIN),
        (PATIENT, GroupProgress(size=8, succeeded=3, waited_s=300.1), DROP),
    ],
)
def test_verdicts(policy: Any, progress: GroupProgress, verdict: GroupAction | int | str):
    """An action, a number of retries, or the reason of a drop."""
    judged = policy.judge(progress)
    if isinstance(verdict, GroupAction):
        assert judged.action is verdict
    elif isinstance(verdict, int):
        assert (judged.action, judged.retries) == (GroupAction.RETRY, verdict)
    else:
        assert (judged.action, judged.reason) == (DROP, verdict)


def test_the_floor_refuses_groups_below_it_despite_binary_fractions():
    assert MinimumViableGroup(min_ratio=1.0).refuse(size=2, members=members(1, 1)) is not None
    assert MinimumViableGroup(min_ratio=1.0).refuse(size=2, members=members(2, 0)) is None
    assert VIABLE.refuse(size=8, members=members(6, 2)) is None
    assert VIABLE.refuse(size=8, members=members(5, 3)) is not None
    assert MinimumViableGroup(min_ratio=0.07, min_members=1).floor(100) == 7
    assert VIABLE.floor(8) == 6
    assert MinimumViableGroup().floor(1) == 1
