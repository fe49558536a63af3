"""The losses of ``--local.loss``, its aggregations and the overlong penalty, against their papers' formulas written
token by token."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from agl_slime.data.normalize import overlong_penalty  # noqa: E402
from agl_slime.train.local.loss import Objective, sequence_means, token_weights  # noqa: E402
from agl_slime.train.local.settings import LocalTrainerSettings  # noqa: E402
from tests.harness.examples import examples  # noqa: E402
from tests.harness.trainer_policy import make_model, make_samples  # noqa: E402
from tests.harness.trainers import trainer  # noqa: E402

LOSSES = ("ppo", "gspo", "cispo")
AGGREGATIONS = ("token", "rollout", "constant")
LONGEST = 30

Rollout = tuple[list[tuple[float, float]], float]
"""(log-prob now, old log-prob) of each token, and the advantage."""


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
