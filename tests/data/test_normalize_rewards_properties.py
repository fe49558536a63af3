from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from agl_slime.data.normalize import normalize_rewards

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


@given(rows=samples(), shift=st.integers(-1000, 1000))
def test_adding_a_constant_to_all_rewards_changes_nothing(rows: Rows, shift: int):
    shifted = normalized([(reward + shift, group, rollout) for reward, group, rollout in rows], std=False)
    for plain, moved in zip(normalized(rows, std=False), shifted, strict=True):
        assert math.isclose(plain, moved, rel_tol=1e-9, abs_tol=1e-6)
