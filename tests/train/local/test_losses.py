"""The losses of ``--local.loss``, its aggregations and the overlong penalty, against their papers' formulas written
rollout by rollout."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from agl_slime.data.normalize import normalize_rewards, overlong_penalty  # noqa: E402
from agl_slime.errors import ConfigError  # noqa: E402
from agl_slime.train.local.batch import TrainBatch  # noqa: E402
from agl_slime.train.local.loss import Objective, sequence_means, token_weights  # noqa: E402
from agl_slime.train.local.settings import LocalTrainerSettings  # noqa: E402
from agl_slime.types import Sample  # noqa: E402
from tests.harness.examples import examples  # noqa: E402
from tests.harness.trainer_policy import make_model, make_samples  # noqa: E402
from tests.harness.trainers import ONE_STEP, assert_close, flat, gradient, trainer  # noqa: E402

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


def plain_gradient(samples: list[Sample], *, loss: str, aggregation: str, clip: float, high: float) -> torch.Tensor:
    """The gradient of one sample after the other in autograd, the sequence's ratio (GSPO, eq. 7) included."""
    model = make_model().double()
    advantages = normalize_rewards(
        [float(s.reward) for s in samples],  # type: ignore[arg-type]
        group_indices=[s.group_index for s in samples],
        rollout_ids=[s.rollout_id for s in samples],
    )
    n_tokens = sum(sum(s.loss_mask or []) for s in samples)
    total = torch.zeros((), dtype=torch.float64)
    for sample, advantage in zip(samples, advantages, strict=True):
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        ids = torch.tensor(sample.tokens)
        every = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        new = every[-sample.response_length :][mask]
        old = torch.tensor(sample.rollout_log_probs, dtype=torch.float32)[mask]
        divisor = {"token": n_tokens, "rollout": len(samples) * len(new), "constant": len(samples) * LONGEST}
        if loss == "gspo":
            ratio = (new - old).mean().exp()
            value = len(new) * torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + high) * advantage)
        else:
            ratio = (new - old).exp()
            value = (ratio.clamp(1 - clip, 1 + high).detach() * advantage * new).sum()
        total = total - value / divisor[aggregation]
    total.backward()
    return flat([parameter.grad for parameter in model.parameters() if parameter.grad is not None])


def halves(sample: Sample) -> list[Sample]:
    """The rollout of ``sample`` in two samples, the second after the first."""
    cut, prompt = sample.response_length // 2, len(sample.tokens) - sample.response_length
    mask, log_probs = sample.loss_mask or [], sample.rollout_log_probs or []
    first = replace(sample, tokens=sample.tokens[: prompt + cut], response_length=cut)
    first.loss_mask, first.rollout_log_probs = mask[:cut], log_probs[:cut]
    second = replace(sample, response_length=sample.response_length - cut)
    second.loss_mask, second.rollout_log_probs = mask[cut:], log_probs[cut:]
    return [first, second]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("loss", "clip", "high"), [("gspo", 0.1, 0.2), ("cispo", 1.0, 0.3)])
def test_the_trainers_gradient_is_the_papers_however_a_rollout_is_cut(
    policy: Path, loss: str, clip: float, high: float, aggregation: str
):
    samples = make_samples(make_model(seed=1), response_lengths=(6, 20))
    expected = plain_gradient(samples, loss=loss, aggregation=aggregation, clip=clip, high=high)
    split = [part for i, sample in enumerate(samples) for part in (halves(sample) if i % 2 else [sample])]
    longest = {"max_response": LONGEST} if aggregation == "constant" else {}
    for batch, size in ((samples, 100_000), (split, 40)):
        ours = gradient(
            policy,
            batch,
            loss=loss,
            aggregation=aggregation,
            clip=clip,
            clip_high=high,
            max_tokens_per_microbatch=size,
            **longest,
        )
        assert_close(ours, expected)


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


def test_the_penalty_counts_the_sampled_tokens_of_the_whole_rollout():
    samples = make_samples(make_model(), groups=1, response_lengths=(8, 20))
    longest = max(sum(s.loss_mask or []) for s in samples)
    settings_of: dict[str, Any] = {"max_response": longest, "overlong_buffer": longest - 1}
    expected = normalize_rewards(
        [
            float(s.reward) + overlong_penalty(sum(s.loss_mask or []), longest=longest, buffer=longest - 1)  # type: ignore[arg-type]
            for s in samples
        ],
        group_indices=[0] * len(samples),
        rollout_ids=list(range(len(samples))),
    )
    batch = TrainBatch.from_samples([part for sample in samples for part in halves(sample)], **settings_of)
    by_rollout = dict(zip(batch.token_rollouts.tolist(), batch.token_rewards.tolist(), strict=True))
    assert [by_rollout[i] for i in range(len(samples))] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"overlong_buffer": 8}, "max_response 0"),
        ({"overlong_buffer": 8, "max_response": 8}, "set max_response"),
        ({"aggregation": "constant"}, "without max_response"),
        ({"max_response": 8}, "max_response is 8; only"),
        ({"loss": "grpo"}, "^loss must be 'ppo', 'gspo' or 'cispo', got"),
    ],
)
def test_settings_of_losses_that_do_nothing_are_refused(fields: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        replace(ONE_STEP, **fields)
