"""Sampling of kept rollouts: best, worst, random and failed, within a budget that lasts to the end of a run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agl_slime.report.rollouts import SizeBudget, choose_rollouts


def test_choice_is_best_worst_random_failed() -> None:
    rewards = {"a": 0.5, "b": 1.0, "c": None, "d": 0.0, "e": 1.0, "f": 0.4}
    chosen = choose_rollouts(rewards, iteration=3)
    assert {label: rollout_id for rollout_id, label in chosen.items() if label != "random"} == {
        "best": "b",
        "worst": "d",
        "failed": "c",
    }
    assert next(rollout_id for rollout_id, label in chosen.items() if label == "random") in {"a", "e", "f"}
    assert chosen == choose_rollouts(rewards, iteration=3)
    assert len({tuple(choose_rollouts(rewards, iteration=iteration)) for iteration in range(30)}) == 3


@given(st.dictionaries(st.text(max_size=3), st.none() | st.floats(0, 1), max_size=8), st.integers(0, 5))
def test_choice_is_among_the_rollouts_and_as_many_as_there_are(
    rewards: dict[str, float | None], iteration: int
) -> None:
    chosen = choose_rollouts(rewards, iteration=iteration)
    assert set(chosen) <= set(rewards)
    scored = sum(reward is not None for reward in rewards.values())
    equal = len({reward for reward in rewards.values() if reward is not None}) == 1
    expected = min(scored, 2 if equal else 3)  # of equals, the best is the worst
    assert len(chosen) == expected + (scored < len(rewards))


def test_a_long_run_is_covered_to_its_end_within_the_budget() -> None:
    budget, size = SizeBudget(200_000), 1_300
    offered = [iteration for iteration in range(1, 5001) if budget.allows(iteration) and budget.take(size)]
    assert len(offered) * size <= 200_000
    assert offered[:20] == list(range(1, 21))
    assert offered[-1] > 400  # 153 records fit
    assert 100 < len(offered) <= 200_000 // size


def test_a_record_above_the_budget_is_skipped_and_a_smaller_one_still_fits() -> None:
    budget = SizeBudget(1_000)
    assert budget.allows(1)
    assert not budget.take(1_001)
    assert not budget.allows(1)
    assert budget.allows(2)
    assert budget.take(900)
