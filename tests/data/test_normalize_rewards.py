from __future__ import annotations

import math

import pytest

from agl_slime.data.normalize import all_equal, normalize_rewards
from agl_slime.errors import RewardError
from agl_slime.report.alarms import find_alarms
from agl_slime.report.audit import figures


def test_one_group_is_centred_and_divided_by_unbiased_std():
    # mean 0.5, unbiased std sqrt(4 * 0.25 / 3)
    std = math.sqrt(1 / 3)
    result = normalize_rewards([1.0, 0.0, 1.0, 0.0], group_indices=[7] * 4, rollout_ids=[0, 1, 2, 3])
    assert result == pytest.approx([0.5 / (std + 1e-6), -0.5 / (std + 1e-6)] * 2, abs=1e-12)


def test_groups_of_unequal_size_with_equal_rewards_are_exactly_zero():
    groups = [0] * 4 + [1] * 3 + [2] * 4
    assert normalize_rewards([5.0] * 11, group_indices=groups, rollout_ids=list(range(11))) == [0.0] * 11


def test_equal_rewards_that_have_no_exact_mean_are_exactly_zero():
    assert normalize_rewards([0.1] * 3, group_indices=[0] * 3, rollout_ids=[0, 1, 2]) == [0.0] * 3


@pytest.mark.parametrize("std", [True, False])
@pytest.mark.parametrize(
    ("rewards", "same"), [([1.0, 0.99999994], True), ([1.0, 1 - 9.9e-7], True), ([0.0, 2e-6], False)]
)
def test_advantages_metric_alarm_and_audit_have_one_tolerance(rewards: list[float], same: bool, std: bool):
    advantages = normalize_rewards(rewards, group_indices=[0, 0], rollout_ids=[0, 1], std=std)
    columns = {
        "outcomes": ["trained"] * 2,
        "reasons": [""] * 2,
        "tokens": [1] * 2,
        "turns": [1] * 2,
        "samples": [1] * 2,
    }
    line = {"ready": True, "rewards": rewards, "code": "", **columns}
    assert (advantages == [0.0, 0.0]) == all_equal(rewards) == same
    assert figures.group_metrics([line])["rollout/groups_zero_variance"] == same
    lines = [{**line, "iteration": iteration, "collected": iteration} for iteration in (1, 2, 3) for _ in range(4)]
    assert ("zero variance" in {alarm.kind for alarm in find_alarms([], lines)}) == same


def test_siblings_count_as_one_rollout():
    result = normalize_rewards([1.0, 1.0, 1.0, 0.0], group_indices=[0] * 4, rollout_ids=[4, 4, 4, 9], std=False)
    assert result == [0.5, 0.5, 0.5, -0.5]


def test_groups_do_not_see_each_other():
    result = normalize_rewards([1.0, 0.0, 100.0, 50.0], group_indices=[0, 0, 1, 1], rollout_ids=[0, 1, 2, 3], std=False)
    assert result == [0.5, -0.5, 25.0, -25.0]


def test_groups_may_be_interleaved():
    result = normalize_rewards([1.0, 100.0, 0.0, 50.0], group_indices=[0, 1, 0, 1], rollout_ids=[0, 1, 2, 3], std=False)
    assert result == [0.5, 25.0, -0.5, -25.0]


def test_a_lone_rollout_gets_zero():
    assert normalize_rewards([3.0], group_indices=[0], rollout_ids=[0]) == [0.0]
    assert normalize_rewards([3.0, 3.0], group_indices=[0, 0], rollout_ids=[8, 8]) == [0.0, 0.0]


def test_sample_without_rollout_id_is_its_own_rollout():
    assert normalize_rewards(
        [1.0, 0.0, 0.0], group_indices=[0] * 3, rollout_ids=[None, None, 1], std=False
    ) == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_rollout_without_group_is_its_own_group():
    # Rollout 0 (two siblings) and rollout 1 have no group; rollouts 2 and 3 share one.
    result = normalize_rewards(
        [9.0, 9.0, 4.0, 1.0, 0.0], group_indices=[None, None, None, 5, 5], rollout_ids=[0, 0, 1, 2, 3], std=False
    )
    assert result == [0.0, 0.0, 0.0, 0.5, -0.5]


def test_an_id_is_never_confused_with_a_position():
    # The sample at position 1 has no rollout id; rollout id 1 belongs to another one.
    assert normalize_rewards([1.0, 0.0], group_indices=[0, 0], rollout_ids=[1, None], std=False) == [0.5, -0.5]
    assert normalize_rewards([1.0, 0.0], group_indices=[1, None], rollout_ids=[0, 1], std=False) == [0.0, 0.0]


def test_nothing_gives_nothing():
    assert normalize_rewards([], group_indices=[], rollout_ids=[]) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad: float):
    with pytest.raises(RewardError, match="sample 1 is"):
        normalize_rewards([0.0, bad], group_indices=[0, 0], rollout_ids=[0, 1])


def test_siblings_with_different_rewards_are_refused():
    with pytest.raises(RewardError, match=r"rollout 3 .* 1\.0 and 0\.0"):
        normalize_rewards([1.0, 0.0], group_indices=[0, 0], rollout_ids=[3, 3])


def test_siblings_in_different_groups_are_refused():
    with pytest.raises(RewardError, match="different groups, 0 and 1"):
        normalize_rewards([1.0, 1.0], group_indices=[0, 1], rollout_ids=[3, 3])


def test_lengths_must_agree():
    with pytest.raises(RewardError, match="lengths 2, 1 and 2"):
        normalize_rewards([1.0, 0.0], group_indices=[0], rollout_ids=[0, 1])
