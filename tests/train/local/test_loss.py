"""The terms of the loss; the losses, their aggregations and the overlong penalty, against the papers'
formulas written token by token."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from agl_slime.data.normalize import overlong_penalty  # noqa: E402
from agl_slime.train.local.loss import (  # noqa: E402
    Objective,
    kl_k3,
    policy_terms,
    sequence_means,
    token_entropy,
    token_log_probs,
    token_weights,
)
from agl_slime.train.local.settings import LocalTrainerSettings  # noqa: E402
from tests.harness.examples import examples  # noqa: E402
from tests.harness.trainer_policy import make_model, make_samples  # noqa: E402
from tests.harness.trainers import trainer  # noqa: E402

LOSSES = ("ppo", "gspo", "cispo")
AGGREGATIONS = ("token", "rollout", "constant")
LONGEST = 30

Rollout = tuple[list[tuple[float, float]], float]
"""(log-prob now, old log-prob) of each token, and the advantage."""


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_log_probs_are_of_the_tempered_softmax():
    logits = torch.tensor([[math.log(1.0), math.log(2.0), math.log(5.0)]] * 2, dtype=torch.float64)
    assert token_log_probs(logits, torch.tensor([0, 2])).tolist() == pytest.approx([math.log(1 / 8), math.log(5 / 8)])
    # At temperature 0.5 the probabilities are proportional to 1, 4, 25.
    assert token_log_probs(logits, torch.tensor([0, 2]), temperature=0.5).tolist() == pytest.approx(
        [math.log(1 / 30), math.log(25 / 30)]
    )


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    targets = torch.arange(4)
    assert token_log_probs(logits, targets).dtype == torch.float32
    assert torch.equal(token_log_probs(logits, targets), token_log_probs(logits.float(), targets))


def test_entropy_is_in_nats():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(3.0), 0.0, -math.inf, -1e9]], dtype=torch.float64)[
        :, [0, 1, 3]
    ]
    uniform, skewed = token_entropy(logits).tolist()
    assert uniform == pytest.approx(math.log(3))
    assert skewed == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        # Inside the range the loss is -r A and its slope in the log-prob is the same.
        (1.0, 2.0, -2.0, -2.0, 0.0),
        (1.1, 2.0, -2.2, -2.2, 0.0),
        # Too likely already, and good: clipped at 1 + 0.3. Too likely, and bad: not clipped.
        (1.5, 2.0, -2.6, 0.0, 1.0),
        (1.5, -2.0, 3.0, 3.0, 0.0),
        # Too unlikely already, and bad: clipped at 1 - 0.2. Too unlikely, and good: not clipped.
        (0.5, -2.0, 1.6, 0.0, 1.0),
        (0.5, 2.0, -1.0, -1.0, 0.0),
        (1.5, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_the_clipped_surrogate(ratio: float, advantage: float, loss: float, slope: float, clipped: float):
    log_probs = doubles(math.log(ratio) - 1.0).requires_grad_()
    terms = policy_terms(log_probs, doubles(-1.0), doubles(advantage), clip_low=0.2, clip_high=0.3)
    terms.loss.sum().backward()
    assert terms.loss.item() == pytest.approx(loss)
    assert terms.ratio.item() == pytest.approx(ratio)
    assert terms.clipped.item() == clipped
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(slope)


def test_k3_is_zero_for_equal_policies_and_averages_to_the_divergence():
    p, q = doubles(0.5, 0.3, 0.2), doubles(0.2, 0.3, 0.5)
    k3 = kl_k3(p.log(), q.log())
    assert (k3 >= 0).all()
    assert k3[1].item() == 0.0
    assert (p * k3).sum().item() == pytest.approx((p * (p / q).log()).sum().item())


@pytest.mark.parametrize(("aggregation", "expected"), [("token", [1 / 3] * 3), ("rollout", [1 / 4, 1 / 4, 1 / 2])])
def test_weights_of_tokens_sum_to_one_per_minibatch(aggregation: Literal["token", "rollout"], expected: list[float]):
    sums = torch.tensor([2, 2, 1])  # rollout 0 has tokens 0 and 1, rollout 1 has token 2
    for n_minibatches in (1, 2):
        weights = token_weights(
            aggregation, rollout_mask_sums=sums, n_tokens=3, n_rollouts=2, n_minibatches=n_minibatches
        )
        assert weights.tolist() == pytest.approx([n_minibatches * weight for weight in expected])


@pytest.mark.parametrize("advantage", [-1.0, 1.0])
@pytest.mark.parametrize(("now", "old"), [(-1.0, -120.0), (-120.0, -1.0)])
@pytest.mark.parametrize("off_policy", ["none", "tis", "icepop"])
def test_a_log_prob_far_from_the_engines_is_bounded_and_counted(
    advantage: float, now: float, old: float, off_policy: str
) -> None:
    log_probs = torch.tensor([old, -2.0])
    objective = Objective(
        settings=LocalTrainerSettings(kl_coef=0.1, old_log_probs="recompute", off_policy=off_policy),  # type: ignore[arg-type]
        old_log_probs=log_probs,
        engine_log_probs=log_probs.flip(0),
        start_log_probs=log_probs,
        advantages=torch.tensor([advantage, 1.0]),
        weights=torch.tensor([0.5, 0.5]),
    )
    log_probs = torch.tensor([now, -2.0], requires_grad=True)
    loss = objective.loss(torch.arange(2), log_probs)
    loss.backward()
    assert math.isfinite(loss.item())
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()
    assert log_probs.grad.abs().max() <= 1.0
    assert all(math.isfinite(value) for value in objective.metrics().values())
    assert objective.metrics()["train/log_ratio_clamped"] == 0.5


def tokens() -> st.SearchStrategy[tuple[float, float]]:
    return st.tuples(st.floats(-6, -0.01), st.floats(-0.6, 0.6)).map(lambda pair: (pair[0], pair[0] + pair[1]))


rollouts_of_tokens = st.lists(
    st.tuples(st.lists(tokens(), min_size=1, max_size=9), st.floats(-2, 2)), min_size=1, max_size=6
)


def clamp(value: float, low: float, high: float) -> float:
    return max(1 - low, min(1 + high, value))


def by_the_paper(loss: str, rollout: Rollout, low: float, high: float) -> list[tuple[float, float]]:
    """Value and slope of each token's loss in its log-prob; of a sequence's ratio its share."""
    pairs, advantage = rollout
    terms = []
    mean = math.fsum(now - old for now, old in pairs) / len(pairs)
    for now, old in pairs:
        ratio = math.exp(mean if loss == "gspo" else now - old)
        bounded = clamp(ratio, low, high)
        if loss == "cispo":
            terms.append((-bounded * advantage * now, -bounded * advantage))
            continue
        chosen = min(ratio * advantage, bounded * advantage)
        free = ratio * advantage <= bounded * advantage
        terms.append((-chosen, -ratio * advantage if free else 0.0))
    return terms


@settings(max_examples=examples(60))
@given(
    rollouts=rollouts_of_tokens,
    loss=st.sampled_from(LOSSES),
    aggregation=st.sampled_from(AGGREGATIONS),
    low=st.sampled_from([0.0003, 0.1, 0.2, 1.0]),
    high=st.sampled_from([None, 0.0004, 0.28, 4.0]),
    size=st.integers(1, 60),
)
def test_loss_and_slopes_are_those_of_the_paper_in_any_chunks(
    rollouts: list[Rollout], loss: Any, aggregation: Any, low: float, high: float | None, size: int
):
    now = torch.tensor([pair[0] for pairs, _ in rollouts for pair in pairs], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([pair[1] for pairs, _ in rollouts for pair in pairs], dtype=torch.float64)
    counts = torch.tensor([len(pairs) for pairs, _ in rollouts])
    numbers = torch.repeat_interleave(torch.arange(len(rollouts)), counts)
    weights = token_weights(
        aggregation,
        rollout_mask_sums=counts[numbers],
        n_tokens=len(now),
        n_rollouts=len(rollouts),
        n_minibatches=1,
        max_tokens=LONGEST,
    )
    objective = Objective(
        settings=LocalTrainerSettings(
            loss=loss,
            aggregation=aggregation,
            clip=low,
            clip_high=high,
            max_response=LONGEST if aggregation == "constant" else 0,
        ),
        old_log_probs=old,
        advantages=torch.tensor([advantage for _, advantage in rollouts], dtype=torch.float64)[numbers],
        weights=weights.double(),
        sequence_log_ratios=sequence_means(now.detach() - old, numbers),
    )
    total = torch.stack([objective.loss(index, now[index]) for index in torch.arange(len(now)).split(size)]).sum()
    total.backward()

    of_token = {"token": lambda _: len(now), "rollout": len, "constant": lambda _: LONGEST}[aggregation]
    per = 1 if aggregation == "token" else len(rollouts)
    expected, slopes = 0.0, []
    for rollout in rollouts:
        for value, slope in by_the_paper(loss, rollout, low, low if high is None else high):
            expected += value / (of_token(rollout[0]) * per)
            slopes.append(slope / (of_token(rollout[0]) * per))
    assert float(total.detach()) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert now.grad is not None
    assert now.grad.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_takes_several_steps_and_reports_its_clipping(policy: Path, loss: str):
    ours = trainer(policy, loss=loss, clip=0.01, n_minibatches=3, epochs=2)
    metrics = ours.train(make_samples(make_model(seed=1)), iteration=0)
    assert metrics["train/steps"] == 6
    assert 0 < metrics["train/clip_fraction"] < 1
    assert math.isfinite(metrics["train/loss"])


@given(n_tokens=st.integers(0, 60), longest=st.integers(2, 50), data=st.data())
def test_the_overlong_penalty_is_dapos(n_tokens: int, longest: int, data: st.DataObject):
    buffer = data.draw(st.integers(1, longest - 1))
    if n_tokens <= longest - buffer:
        expected = 0.0
    elif n_tokens <= longest:
        expected = ((longest - buffer) - n_tokens) / buffer
    else:
        expected = -1.0
    assert overlong_penalty(n_tokens, longest=longest, buffer=buffer) == pytest.approx(expected, abs=1e-12)
    assert overlong_penalty(n_tokens, longest=longest, buffer=0) == 0.0
