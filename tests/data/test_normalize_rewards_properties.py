from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from agl_slime.data.normalize import normalize_rewards


@dataclass
class Samples:
    rewards: list[float]
    groups: list[int | None]
    rollouts: list[int | None]

    def normalized(self, *, std: bool) -> list[float]:
        return normalize_rewards(self.rewards, group_indices=self.groups, rollout_ids=self.rollouts, std=std)


rewards = st.floats(min_value=-1e6, max_value=1e6, allow_nan=False) | st.sampled_from([0.0, 1.0, 0.1])


@st.composite
def samples(draw: st.DrawFn, *, max_siblings: int = 4) -> Samples:
    """Rollouts in up to three groups, each split into one or more siblings."""
    made = Samples([], [], [])
    for rollout in range(draw(st.integers(1, 10))):
        reward, group = draw(rewards), draw(st.integers(0, 2))
        for _ in range(draw(st.integers(1, max_siblings))):
            made.rewards.append(reward)
            made.groups.append(group)
            made.rollouts.append(rollout)
    return made


@given(data=samples(), std=st.booleans(), random=st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(data: Samples, std: bool, random):
    order = list(range(len(data.rewards)))
    random.shuffle(order)
    shuffled = Samples(
        [data.rewards[i] for i in order], [data.groups[i] for i in order], [data.rollouts[i] for i in order]
    )
    expected = data.normalized(std=std)
    assert shuffled.normalized(std=std) == [expected[i] for i in order]


@given(data=samples(), std=st.booleans())
def test_the_number_of_siblings_does_not_matter(data: Samples, std: bool):
    first = {rollout: i for i, rollout in reversed(list(enumerate(data.rollouts)))}
    merged = Samples(
        [data.rewards[i] for i in first.values()],
        [data.groups[i] for i in first.values()],
        [data.rollouts[i] for i in first.values()],
    )
    of_rollout = dict(zip(merged.rollouts, merged.normalized(std=std), strict=True))
    assert data.normalized(std=std) == [of_rollout[rollout] for rollout in data.rollouts]


@given(data=samples(max_siblings=1), std=st.booleans())
def test_every_group_has_mean_zero_and_keeps_the_order_of_rewards(data: Samples, std: bool):
    result = data.normalized(std=std)
    for group in set(data.groups):
        members = [(data.rewards[i], result[i]) for i in range(len(result)) if data.groups[i] == group]
        largest = max(abs(advantage) for _, advantage in members)
        assert abs(math.fsum(advantage for _, advantage in members)) <= 1e-9 * max(
            1.0, largest, *(abs(reward) for reward, _ in members)
        )
        ranked = [advantage for _, advantage in sorted(members)]
        assert ranked == sorted(ranked)


@given(data=samples(max_siblings=1))
def test_with_std_a_spread_group_has_unit_deviation(data: Samples):
    result = data.normalized(std=True)
    for group in set(data.groups):
        mine = [i for i in range(len(result)) if data.groups[i] == group]
        if len(mine) < 2 or max(data.rewards[i] for i in mine) - min(data.rewards[i] for i in mine) < 1e-2:
            continue
        deviation = math.sqrt(math.fsum(result[i] ** 2 for i in mine) / (len(mine) - 1))
        assert 1 - 1e-3 < deviation <= 1 + 1e-9


@given(data=samples(), shift=st.integers(-1000, 1000))
def test_adding_a_constant_to_all_rewards_changes_nothing(data: Samples, shift: int):
    shifted = Samples([reward + shift for reward in data.rewards], data.groups, data.rollouts)
    for before, after in zip(data.normalized(std=False), shifted.normalized(std=False), strict=True):
        assert math.isclose(before, after, rel_tol=1e-9, abs_tol=1e-6)
