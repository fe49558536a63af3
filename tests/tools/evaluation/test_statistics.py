"""pass@k equals the share over every subset; intervals cover the mean as often as they say."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agl_slime.tools.evaluation.statistics import compare, estimate, pass_at_k, sum_up


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


def binomial(n: int, p: float) -> list[float]:
    return [math.comb(n, count) * p**count * (1 - p) ** (n - count) for count in range(n + 1)]


@pytest.mark.parametrize(("worst", "best"), [(0.0, 1.0), (-1.0, 1.0), (-0.5, 1.0), (-0.1, 1.0), (0.0, 10.0)])
def test_intervals_of_two_rewards_cover_the_mean_in_93_of_100_draws(worst: float, best: float) -> None:
    """Exact coverage: the probability of all outcomes whose interval has the mean. Both rewards are known."""
    shares = [0.02, 0.03, 0.05, *np.arange(0.1, 0.91, 0.05), 0.95, 0.97, 0.98]
    for n in (16, 17, 23, 32, 50, 64, 100, 128, 256):
        draws = [[best] * count + [worst] * (n - count) for count in range(n + 1)]
        ends = [estimate(values, rewards=(worst, best)) for values in draws]
        assert all(each is not None and each.low < each.high for each in ends)  # type: ignore[operator]
        for p in shares:
            mean, outcomes = worst + p * (best - worst), zip(binomial(n, p), ends, strict=True)
            covered = sum(chance for chance, each in outcomes if each.low <= mean <= each.high)  # type: ignore[union-attr, operator]
            assert covered >= 0.93, (n, p)


@pytest.mark.parametrize(
    ("n", "k", "samples", "spread"),
    [*itertools.product((32, 64), (4,), (8,), (0.2, 1.0, 10.0)), (45, 2, 64, None)],
)
def test_intervals_of_skewed_pass_rates_cover_the_mean_in_93_of_100_draws(
    n: int, k: int, samples: int, spread: float | None
) -> None:
    """A model that passes nine tenths of its samples, more in some tasks than in others; or (no spread) nearly all of
    them, but none in 3 % of the tasks."""
    rng = np.random.default_rng(5)
    rates = np.array([pass_at_k(samples=samples, passed=passed, k=k) for passed in range(samples + 1)])

    def draw(size: tuple[int, ...]) -> np.ndarray:
        rare = np.where(rng.random(size) < 0.03, 0.0, 0.97)
        return rates[rng.binomial(samples, rare if spread is None else rng.beta(0.9 * spread, 0.1 * spread, size))]

    mean = draw((1_000_000,)).mean()
    ends = [estimate(values) for values in draw((1500, n)).tolist()]
    covered = sum(each.low <= mean <= each.high for each in ends)  # type: ignore[union-attr, operator]
    assert covered >= 0.92 * len(ends)  # of a chance of 0.93, a share of 1,500 draws is below 0.92 in one of 15 cases


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=40), st.booleans())
@example([0.0, 0.03125], False)  # half a task's worth: less than the correction
def test_interval_has_the_mean_and_a_width_within_the_range(values: list[float], differences: bool) -> None:
    result = estimate(values, differences=differences)
    assert result is not None
    assert result.low is not None
    assert result.high is not None
    assert result.low < result.high
    least, most = min(0.0, *values), max(1.0, *values)
    if differences or (
        least < 0 and len(values) < 16
    ):  # few tasks: others may have rewards below the least mean of these
        mirrored, most = estimate([-value for value in values], differences=differences), max(most, -least)
        least = -most
        assert mirrored is not None
        if differences or min(values) < 0 < max(values):
            assert (mirrored.low, mirrored.high) == (pytest.approx(-result.high), pytest.approx(-result.low))
    assert least - 1e-9 <= result.low <= result.mean + 1e-9
    assert result.mean - 1e-9 <= result.high <= most + 1e-9


def test_paired_interval_is_narrower_and_changes_of_sign_mirror_it() -> None:
    old = {task: [value] for task, value in enumerate([0.0, 0.2, 0.4, 0.6, 0.8] * 8)}
    new = {task: [value + 0.1 + 0.02 * (task % 5)] for task, (value,) in old.items()}
    result, back = (compare(*pair, limit=1.0)["reward"] for pair in ((old, new), (new, old)))
    assert result["mean"] == pytest.approx(0.14)
    assert (back["low"], back["high"]) == (pytest.approx(-result["high"]), pytest.approx(-result["low"]))
    alone = estimate([value for (value,) in new.values()])
    assert alone is not None
    assert 0 < result["low"] < result["high"] < result["low"] + 0.7 * ((alone.high or 0) - (alone.low or 0))


def test_rewards_of_single_samples_bound_the_mean_and_the_difference() -> None:
    """Samples of -1 and 1 with equal means in each task: other tasks may have any mean between them."""
    samples = {task: [-1.0, 1.0] for task in range(16)}
    result, difference = sum_up(samples, limit=1.0, k=1)["reward"], compare(samples, samples, limit=1.0)["reward"]
    assert (result["low"], result["high"]) == (pytest.approx(-result["high"]), pytest.approx(-result["low"]))
    assert result["low"] < -0.1
    narrow = estimate([0.0] * 16, differences=True)  # between -1 and 1, where the rewards allow -2 and 2
    assert narrow is not None
    assert (difference["low"], difference["high"]) == pytest.approx((2 * narrow.low, 2 * narrow.high))  # type: ignore[operator]


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
