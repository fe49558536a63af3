"""pass@k and intervals equal an independent computation: every subset, every resample, SciPy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.report.evaluation.statistics import compare, estimate, pass_at_k, sum_up


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(passed: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(passed)))
    subsets = list(itertools.combinations(passed, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(samples=len(passed), passed=sum(passed), k=k) == pytest.approx(share, abs=1e-12)


def test_pass_at_k_of_too_few_samples_is_an_error() -> None:
    for samples, passed, k in ((3, 1, 4), (3, 4, 1), (0, 0, 1), (3, -1, 1), (3, 1, 0)):
        with pytest.raises(ValueError, match="k must be from 1"):
            pass_at_k(samples=samples, passed=passed, k=k)


def test_paired_interval_equals_full_resampling_and_beats_unpaired() -> None:
    old = {task: [value] for task, value in enumerate([0.0, 0.2, 0.4, 0.6, 0.8])}
    new = {task: [value + 0.1 + 0.02 * task] for task, (value,) in old.items()}
    differences = [new[task][0] - old[task][0] for task in old]
    means = [np.mean(drawn) for drawn in itertools.product(differences, repeat=5)]
    low, high = np.quantile(means, [0.025, 0.975])
    result = compare(old, new, limit=1.0)["reward"]
    assert result["mean"] == pytest.approx(0.14)
    assert (result["low"], result["high"]) == (pytest.approx(low, abs=0.004), pytest.approx(high, abs=0.004))
    alone = estimate([value for (value,) in new.values()])
    assert alone is not None
    assert result["high"] - result["low"] < ((alone.high or 0) - (alone.low or 0)) / 4


def test_only_tasks_that_both_have_are_compared_and_changes_are_named() -> None:
    old = {0: [1.0], 1: [0.0, 0.0], 2: [1.0, 0.0], 3: [], 4: [0.0]}
    new = {0: [0.0], 1: [1.0, 1.0], 2: [1.0, 1.0], 3: [1.0], 5: [1.0]}
    result = compare(old, new, limit=1.0)
    assert (result["gained"], result["lost"], result["pass@1"]["tasks"]) == ([1], [0], 3)
    assert result["pass@1"]["mean"] == pytest.approx((-1 + 1 + 0.5) / 3)


def test_a_failed_sample_is_no_reward_of_zero() -> None:
    result = sum_up({0: [1.0], 1: [], 2: [1.0, 1.0]}, limit=1.0, k=2)
    assert (result["reward"]["mean"], result["reward"]["tasks"]) == (1.0, 2)
    assert (result["pass@2"]["mean"], result["pass@2"]["tasks"]) == (1.0, 1)  # two tasks have no two samples


def test_one_task_has_no_interval_and_none_has_no_mean() -> None:
    alone = estimate([0.5])
    assert alone is not None
    assert (alone.mean, alone.low, alone.high) == (0.5, None, None)
    assert estimate([]) is None
