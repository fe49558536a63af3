"""slime's normalised rewards and advantages, beside formulas written out a Sample and a token at a time."""

from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="slime's float32 rounding is torch's: pip install \"agl-slime[local]\"")

from agl_slime.tools.forensics import formulas
from agl_slime.tools.slime_dumps.files import TrainedRow
from tests.harness.examples import examples

HALVES = st.integers(0, 4).map(lambda n: n / 2)


@st.composite
def batches(draw: Any) -> tuple[int, list[float]]:
    """The size of groups and the rewards of full ones."""
    size = draw(st.integers(2, 6))
    return size, draw(st.lists(HALVES, min_size=size, max_size=5 * size).map(lambda r: r[: len(r) // size * size]))


def normalized(rewards: list[float], *, std: bool) -> list[float]:
    spread = stdev(rewards) + 1e-6 if std else 1.0
    return [(reward - fmean(rewards)) / spread for reward in rewards]


@settings(max_examples=examples(100), deadline=None)
@given(batches(), st.booleans(), st.data())
def test_normalized_rewards_equal_the_formula_of_each_rule(batch: tuple[int, list[float]], std: bool, data: Any):
    size, rewards = batch
    n = len(rewards)
    columns: Any = {"prompts": [place // size for place in range(n)], "rollouts": [*range(n)], "use": [True] * n}
    groups = [rewards[start : start + size] for start in range(0, n, size)]
    by_group = [value for group in groups for value in normalized(group, std=std)]
    for rule, expected in (
        (formulas.RewardRule(groups="place", size=size, std=std), by_group),
        (formulas.RewardRule(groups="prompt", std=std), by_group),
        (formulas.RewardRule(groups="batch", std=std), normalized(rewards, std=std)),
        (formulas.RewardRule(groups="none"), rewards),
    ):
        assert rule.apply(rewards, **columns) == pytest.approx(expected, abs=1e-6)
        rule = formulas.find_rule(
            [*formulas.reward_rules(formulas.StepFlags(), columns["prompts"])], rewards, expected, **columns
        )
        assert rule.apply(rewards, **columns) == pytest.approx(expected, abs=3e-6)

    # a Sample that is not used has no part in the baseline
    gone = data.draw(st.integers(0, n - 1))
    columns["use"][gone] = False
    start = gone // size * size
    group = [rewards[place] for place in range(start, start + size) if place != gone]
    for groups in ("place", "prompt"):
        result = formulas.RewardRule(groups=groups, size=size, std=False).apply(rewards, **columns)  # type: ignore[arg-type]
        assert result.pop(gone) == 0.0
        assert result[start : start + size - 1] == pytest.approx(normalized(group, std=False), abs=1e-6)


@st.composite
def rows(draw: Any) -> list[TrainedRow]:
    made = []
    for seed in draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=4)):
        rng = np.random.default_rng(seed)
        length = int(rng.integers(2, 9))
        mask = rng.random(length) < 0.6
        mask[rng.integers(length)] = True
        names = ("log_probs", "ref_log_probs", "teacher_log_probs", "values")
        columns: Any = {name: rng.normal(size=length) for name in names}
        made.append(TrainedRow(mask=mask, **columns))
    return made


@settings(max_examples=examples(50), deadline=None)
@given(rows(), st.floats(0.5, 1), st.floats(0.5, 1), st.floats(0, 0.5), st.booleans())
def test_advantages_equal_the_formula_of_each_estimator(made, gamma, lambd, kl_coef, whiten):
    rewards = [0.5 * place - 0.25 for place in range(len(made))]
    expected: dict[str, list[np.ndarray]] = {"grpo": [], "reinforce_plus_plus": [], "ppo": []}
    expected["reinforce_plus_plus_baseline"] = []
    for reward, row in zip(rewards, made, strict=True):
        length, kl = len(row.mask), row.log_probs - row.ref_log_probs  # type: ignore[operator]
        expected["grpo"].append(np.full(length, reward))
        expected["reinforce_plus_plus_baseline"].append(reward - kl_coef * kl)
        last = max(np.flatnonzero(row.mask))
        tokens = [-kl_coef * kl[t] * row.mask[t] + reward * (t == last) for t in range(length)]
        returns = [sum(gamma ** (u - t) * tokens[u] for u in range(t, length)) for t in range(length)]
        expected["reinforce_plus_plus"].append(np.array(returns))
        values = [*row.values, 0.0]  # type: ignore[misc]
        tokens = [-kl_coef * kl[t] + reward * (t == length - 1) for t in range(length)]
        deltas = [tokens[t] + gamma * values[t + 1] - values[t] for t in range(length)]
        gae = [sum((gamma * lambd) ** (u - t) * deltas[u] for u in range(t, length)) for t in range(length)]
        expected["ppo"].append(np.array(gae))
    for estimator, formula in expected.items():
        figures = {"gamma": gamma, "lambd": lambd, "kl_coef": kl_coef, "normalize_advantages": whiten}
        flags = formulas.StepFlags(advantage_estimator=estimator, **figures)
        assert formulas.unknown_figures(made, flags) == []
        if whiten:
            used = [value for values, row in zip(formula, made, strict=True) for value in values[row.mask].tolist()]
            variance = stdev(used) ** 2 if len(used) > 1 else 0.0
            formula = [(values - fmean(used)) / (variance + 1e-8) ** 0.5 for values in formula]
        for result, values in zip(formulas.token_advantages(rewards, made, flags), formula, strict=True):
            np.testing.assert_allclose(result.advantages, values, atol=1e-6)


@settings(max_examples=examples(20), deadline=None)
@given(rows())
def test_distillation_lowers_advantages_by_the_reverse_kl(made: list[TrainedRow]) -> None:
    flags = formulas.StepFlags(use_opd=True, opd_kl_coef=0.5)
    for result, row in zip(formulas.token_advantages([1.0] * len(made), made, flags), made, strict=True):
        expected = 1.0 - 0.5 * (row.log_probs - row.teacher_log_probs)  # type: ignore[operator]
        np.testing.assert_allclose(result.advantages, expected, atol=1e-6)
    lacking = [TrainedRow(mask=row.mask, log_probs=row.log_probs) for row in made]
    assert formulas.unknown_figures(lacking, flags) == ["teacher_log_probs"]


def test_flags_are_slimes_and_others_are_skipped() -> None:
    words = "--actor-num-gpus-per-node 8 --eps-clip-high=0.28 --use-tis --disable-grpo-std-normalization --lr 3e-6"
    flags = formulas.StepFlags.parse([*words.split(), "--colocate", "--eps-clip-c", "3"])
    assert (flags.eps_clip_high, flags.use_tis, flags.grpo_std_normalization, flags.lr) == (0.28, True, False, 3e-6)
    assert (flags.eps_clip, flags.rewards_normalization, flags.specified) == (0.2, True, True)
    assert flags.left_out == ("--eps-clip-c",)
    assert not formulas.StepFlags.parse([]).specified
