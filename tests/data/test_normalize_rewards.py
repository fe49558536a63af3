"""Advantages within a group: one reward per rollout, whatever the number of its Samples."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.data.normalize import all_equal, normalize_rewards
from agl_slime.errors import RewardError
from agl_slime.report.alarms import find_alarms
from agl_slime.tools.audit import figures


def test_one_group_is_centred_and_divided_by_unbiased_std():
    # mean 0.5, unbiased std sqrt(4 * 0.25 / 3)
    std = math.sqrt(1 / 3)
    result = normalize_rewards([1.0, 0.0, 1.0, 0.0], group_indices=[7] * 4, rollout_ids=[0, 1, 2, 3])
    assert result == pytest.approx([0.5 / (std + 1e-6), -0.5 / (std + 1e-6)] * 2, abs=1e-12)


def test_equal_rewards_and_lone_rollouts_are_exactly_zero():
    """Also in groups of unequal size, and where the mean of equal rewards is not exact."""
    groups = [0] * 4 + [1] * 3 + [2] * 4
    assert normalize_rewards([5.0] * 11, group_indices=groups, rollout_ids=list(range(11))) == [0.0] * 11
    assert normalize_rewards([0.1] * 3, group_indices=[0] * 3, rollout_ids=[0, 1, 2]) == [0.0] * 3
    assert normalize_rewards([3.0], group_indices=[0], rollout_ids=[0]) == [0.0]
    assert normalize_rewards([3.0, 3.0], group_indices=[0, 0], rollout_ids=[8, 8]) == [0.0, 0.0]
    assert normalize_rewards([], group_indices=[], rollout_ids=[]) == []


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


@pytest.mark.parametrize(
    ("rewards", "groups", "rollouts", "advantages"),
    [
        ([1.0, 1.0, 1.0, 0.0], [0] * 4, [4, 4, 4, 9], [0.5, 0.5, 0.5, -0.5]),  # siblings are one rollout
        ([1.0, 100.0, 0.0, 50.0], [0, 1, 0, 1], [0, 1, 2, 3], [0.5, 25.0, -0.5, -25.0]),  # groups are independent
        (
            [1.0, 0.0, 0.0],
            [0] * 3,
            [None, None, 1],
            pytest.approx([2 / 3, -1 / 3, -1 / 3]),
        ),  # no rollout id: a rollout of its own
        # rollout 0 (two siblings) and rollout 1 have no group; rollouts 2 and 3 share one
        ([9.0, 9.0, 4.0, 1.0, 0.0], [None, None, None, 5, 5], [0, 0, 1, 2, 3], [0.0, 0.0, 0.0, 0.5, -0.5]),
        # the sample at position 1 has no rollout id, or no group; id 1 belongs to the other sample
        ([1.0, 0.0], [0, 0], [1, None], [0.5, -0.5]),
        ([1.0, 0.0], [1, None], [0, 1], [0.0, 0.0]),
    ],
)
def test_siblings_groups_and_missing_ids(rewards: Any, groups: Any, rollouts: Any, advantages: Any):
    result = normalize_rewards(rewards, group_indices=groups, rollout_ids=rollouts, std=False)
    assert result == advantages


@pytest.mark.parametrize(
    ("rewards", "groups", "rollouts", "sentence"),
    [
        ([0.0, math.nan], [0, 0], [0, 1], "sample 1 is"),
        ([0.0, -math.inf], [0, 0], [0, 1], "sample 1 is"),
        ([1.0, 0.0], [0, 0], [3, 3], r"rollout 3 .* 1\.0 and 0\.0"),
        ([1.0, 1.0], [0, 1], [3, 3], "different groups, 0 and 1"),
        ([1.0, 0.0], [0], [0, 1], "lengths 2, 1 and 2"),
    ],
)
def test_contradictory_columns_are_refused(rewards: Any, groups: Any, rollouts: Any, sentence: str):
    with pytest.raises(RewardError, match=sentence):
        normalize_rewards(rewards, group_indices=groups, rollout_ids=rollouts)


# -- properties ------------------------------------------------------------------------------------------------------

Rows = list[tuple[float, int, int]]
"""A reward, its group and its rollout for each sample."""
rewards = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False) | st.sampled_from([0.0, 1.0, 0.1])


def normalized(rows: Rows, *, std: bool) -> list[float]:
    values, groups, rollouts = zip(*rows, strict=True)
    return normalize_rewards(list(values), group_indices=list(groups), rollout_ids=list(rollouts), std=std)


@st.composite
def samples(draw: st.DrawFn, *, max_siblings: int = 4) -> Rows:
    """Rollouts in up to three groups, each split into one or more siblings."""
    rows: Rows = []
    for rollout in range(draw(st.integers(1, 10))):
        row = (draw(rewards), draw(st.integers(0, 2)), rollout)
        rows += [row] * draw(st.integers(1, max_siblings))
    return rows


@given(rows=samples(), std=st.booleans(), random=st.randoms(use_true_random=False))
def test_neither_order_nor_number_of_siblings_matters(rows: Rows, std: bool, random):
    expected = normalized(rows, std=std)
    order = list(range(len(rows)))
    random.shuffle(order)
    assert normalized([rows[i] for i in order], std=std) == [expected[i] for i in order]
    merged = list(dict.fromkeys(rows))
    of_row = dict(zip(merged, normalized(merged, std=std), strict=True))
    assert expected == [of_row[row] for row in rows]


@given(rows=samples(max_siblings=1), std=st.booleans())
def test_groups_have_mean_zero_unit_deviation_and_the_order_of_rewards(rows: Rows, std: bool):
    result = normalized(rows, std=std)
    for group in {group for _, group, _ in rows}:
        members = [(row[0], advantage) for row, advantage in zip(rows, result, strict=True) if row[1] == group]
        values, advantages = [reward for reward, _ in members], [advantage for _, advantage in members]
        assert abs(math.fsum(advantages)) <= 1e-9 * max(1.0, *map(abs, values), *map(abs, advantages))
        ranked = [advantage for _, advantage in sorted(members)]
        assert ranked == sorted(ranked)
        if std and len(members) > 1 and max(values) - min(values) >= 1e-2:
            deviation = math.sqrt(math.fsum(advantage**2 for advantage in advantages) / (len(members) - 1))
            assert 1 - 1e-3 < deviation <= 1 + 1e-9
