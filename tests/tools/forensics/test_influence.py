"""The influences of rollouts on a step: inner products of gradients that add up to the step's."""

import copy
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from agl_slime.tools.forensics.influence import SKETCH, Influences, influences  # noqa: E402
from agl_slime.train.local.settings import LocalTrainerSettings  # noqa: E402
from agl_slime.types import Sample  # noqa: E402
from tests.harness.examples import examples  # noqa: E402
from tests.harness.trainer_policy import make_model, make_samples  # noqa: E402
from tests.harness.trainers import ONE_STEP, assert_close, flat, gradient, trainer  # noqa: E402

LOSSES = [
    {},
    {"aggregation": "rollout"},
    {"loss": "gspo", "aggregation": "rollout"},
    {"loss": "cispo"},
    {"old_log_probs": "recompute", "off_policy": "tis"},
    {"kl_coef": 0.1},
]


@cache
def batch(seed: int, *, groups: int = 2) -> list[Sample]:
    """Rollouts of another policy: ratios are away from 1, and some are clipped."""
    return make_samples(make_model(seed=1), groups=groups, seed=seed)


def gradients_of(policy: Path, samples: list[Sample], **changes: Any) -> dict[int, tuple[Any, Any]]:
    ours = trainer(policy, ONE_STEP, **changes)
    ours.model.double()
    return ours.rollout_gradients(samples, lambda each: flat(each).clone())


@pytest.mark.parametrize("changes", LOSSES, ids=str)
def test_rollouts_gradients_add_up_to_the_gradient_of_the_step(policy: Path, changes: dict[str, Any]):
    samples = batch(3)
    gradients = gradients_of(policy, samples, **changes)
    assert len(gradients) == len(samples)
    assert_close(sum(of_loss for of_loss, _ in gradients.values()), gradient(policy, samples, **changes))


@settings(max_examples=examples(8))
@given(seed=st.integers(0, 50), siblings=st.integers(1, 3))
def test_samples_of_a_rollout_are_one_part_of_the_sum(policy: Path, seed: int, siblings: int):
    samples = copy.deepcopy(batch(seed))
    for number, sample in enumerate(samples):
        sample.rollout_id = number - number % siblings if number < 4 else number
        sample.reward = samples[sample.rollout_id].reward
    gradients = gradients_of(policy, samples)
    assert [*gradients] == sorted({sample.rollout_id for sample in samples})
    if any(of_loss.norm() for of_loss, _ in gradients.values()):
        assert_close(sum(of_loss for of_loss, _ in gradients.values()), gradient(policy, samples))


def test_the_influence_of_a_rollout_on_itself_is_its_squared_norm(policy: Path):
    samples = batch(3)
    result = influences(trainer(policy, ONE_STEP), samples)
    gradients = gradients_of(policy, samples)
    norms = [float(of_loss.square().sum()) for of_loss, _ in gradients.values()]
    assert result.sketch == 0
    assert np.diag(result.on_loss) == pytest.approx(norms, rel=1e-4)
    assert np.allclose(result.on_loss, result.on_loss.T)
    assert result.shares.sum() == pytest.approx(1.0)
    assert result.on_loss.sum() == pytest.approx(float(gradient(policy, samples).square().sum()), rel=1e-4)


def test_a_sketch_ranks_rollouts_as_the_exact_gradients_do(policy: Path):
    samples = batch(5, groups=4)
    ours = trainer(policy, ONE_STEP)
    exact = influences(ours, samples)

    def ranks(values: np.ndarray) -> np.ndarray:
        return values.argsort().argsort()

    def agreement(result: Influences) -> float:
        return float(np.corrcoef(ranks(exact.shares), ranks(result.shares))[0, 1])

    sketched = influences(ours, samples, sketch=SKETCH)
    assert sketched.sketch == SKETCH
    assert agreement(sketched) > 0.95
    assert sketched.shares.argmax() == exact.shares.argmax()
    assert agreement(influences(ours, samples, sketch=8)) < agreement(sketched)


def test_leaving_a_rollout_out_changes_log_probs_as_predicted(policy: Path):
    """Plain gradient steps with a small learning rate. Without normalization and with a constant divisor the other
    rollouts' parts grow by ``N / (N - 1)``, since the mean is of fewer."""
    plain = LocalTrainerSettings(
        n_minibatches=1,
        grad_clip=math.inf,
        rewards_normalization=False,
        std_normalization=False,
        aggregation="constant",
        max_response=20,
    )
    samples, lr = make_samples(make_model(), groups=2, seed=4), 1e-2
    for sample, reward in zip(samples, (1.0, -1.0) * 4, strict=True):
        sample.reward = reward
    result, n = influences(trainer(policy, plain), samples), len(samples)

    def sums(without: int | None) -> np.ndarray:
        ours = trainer(policy, replace(plain, lr=lr))
        ours._optimizer = torch.optim.SGD(ours._trained, lr=lr)
        ours.train(
            [replace(sample, remove_sample=sample.rollout_id == without) for sample in copy.deepcopy(samples)],
            iteration=0,
        )
        return np.array([values.sum() for values in ours.score(samples)], dtype=np.float64)

    whole = sums(None)
    for number in range(3):
        remaining = result.on_log_probs.sum(0) - result.on_log_probs[number]
        predicted = lr * (n / (n - 1) * remaining - result.on_log_probs.sum(0))
        changed = sums(number) - whole
        assert np.sign(changed[number]) == np.sign(predicted[number]) == -np.sign(samples[number].reward)
        assert np.corrcoef(changed, predicted)[0, 1] > 0.99
        assert changed[number] == pytest.approx(predicted[number], rel=0.1)


def test_influences_leave_the_trainer_as_it_was(policy: Path):
    samples = batch(3)
    first, second = trainer(policy), trainer(policy)
    influences(first, samples)
    assert first.train(samples, iteration=1)["train/loss"] == second.train(samples, iteration=1)["train/loss"]
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))
