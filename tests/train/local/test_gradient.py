"""The gradient of the local trainer against the loss written down plainly, and what must not change it."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import PreTrainedModel  # noqa: E402

from agl_slime.data.normalize import normalize_rewards  # noqa: E402
from agl_slime.types import Sample  # noqa: E402
from tests.harness.trainer_policy import make_model, make_samples, response_log_probs  # noqa: E402
from tests.harness.trainers import ONE_STEP, assert_close, flat, gradient, gradients, trainer  # noqa: E402


def plain_loss(
    model: PreTrainedModel, samples: list[Sample], *, aggregation: str, kl_coef: float = 0.0, start: Any = None
) -> torch.Tensor:
    """The loss written down sample by sample, without batching, masking tricks or shared code; every sample a rollout
    of its own."""
    advantages = normalize_rewards(
        [float(s.reward) for s in samples],
        group_indices=[s.group_index for s in samples],
        rollout_ids=[s.index for s in samples],
    )  # type: ignore[arg-type]
    total = torch.zeros((), dtype=torch.float64)
    n_tokens = sum(sum(sample.loss_mask or []) for sample in samples)
    for sample, advantage in zip(samples, advantages, strict=True):
        ids = torch.tensor([sample.tokens])
        prompt_length = len(sample.tokens) - sample.response_length
        log_probs = model(ids).logits[0].log_softmax(-1)
        assert sample.loss_mask is not None
        assert sample.rollout_log_probs is not None
        of_sample = torch.zeros((), dtype=torch.float64)
        for j in range(sample.response_length):
            if sample.loss_mask[j]:
                position = prompt_length + j
                log_prob = log_probs[position - 1, sample.tokens[position]]
                ratio = torch.exp(log_prob - np.float32(sample.rollout_log_probs[j]))
                of_sample = of_sample - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                if kl_coef:
                    with torch.no_grad():
                        reference = start(ids).logits[0].log_softmax(-1)[position - 1, sample.tokens[position]]
                    of_sample = of_sample + kl_coef * (torch.exp(reference - log_prob) - 1 - (reference - log_prob))
        total = total + (
            of_sample / n_tokens if aggregation == "token" else of_sample / sum(sample.loss_mask) / len(samples)
        )
    return total


@pytest.mark.parametrize("aggregation", ["token", "rollout"])
def test_the_gradient_is_that_of_the_loss_written_down_plainly(policy: Path, aggregation: str):
    samples = make_samples(
        make_model(seed=1), groups=2
    )  # of another policy, so that ratios are away from 1 and some are clipped
    model = make_model().double()
    loss = plain_loss(model, samples, aggregation=aggregation)
    loss.backward()
    expected = flat([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert_close(gradient(policy, samples, aggregation=aggregation), expected)
    metrics = trainer(policy, ONE_STEP, aggregation=aggregation).train(samples, iteration=0)
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)
    assert 0 < metrics["train/clip_fraction"] < 1


def test_kl_is_measured_from_the_old_policy_to_the_new(policy: Path):
    samples = make_samples(make_model(seed=1), groups=2)
    k3 = []
    for sample in samples:
        new = response_log_probs(make_model(), sample.tokens, sample.response_length)
        triples = zip(new, sample.rollout_log_probs or [], sample.loss_mask or [], strict=True)
        k3 += [math.exp(now - old) - 1 - (now - old) for now, old, trained in triples if trained]
    assert trainer(policy, ONE_STEP).train(samples, iteration=0)["train/kl"] == pytest.approx(
        sum(k3) / len(k3), rel=1e-4
    )


def test_the_gradient_with_kl_is_that_of_the_loss_written_down_plainly(policy: Path):
    samples = make_samples(make_model(), groups=2)
    model, start = make_model().double(), make_model().double()
    ours = trainer(policy, ONE_STEP, kl_coef=0.5)
    ours.model.double()
    assert ours._start_model is not None
    ours._start_model.double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # both the same step away from the start policy
        for mine, theirs in zip(model.parameters(), ours.model.parameters(), strict=True):
            mine += 0.01 * torch.randn(mine.shape, generator=generator, dtype=torch.float64)
            theirs.copy_(mine)
    plain_loss(model, samples, aggregation="token", kl_coef=0.5, start=start).backward()
    gradients: list[torch.Tensor] = []
    ours._optimizer.register_step_pre_hook(
        lambda *_: gradients.append(flat([parameter.grad.clone() for parameter in ours.model.parameters()]))
    )
    assert ours.train(samples, iteration=0)["train/reference_kl"] > 0.01
    assert_close(gradients[0], flat([parameter.grad for parameter in model.parameters() if parameter.grad is not None]))


@pytest.mark.parametrize("aggregation", ["token", "rollout"])
def test_padding_and_the_size_of_microbatches_do_not_change_the_gradient(policy: Path, aggregation: str):
    samples = make_samples(make_model(), response_lengths=(2, 60))
    alone = gradient(policy, samples, aggregation=aggregation, max_tokens_per_microbatch=1)
    for size in (100, 100_000):
        assert_close(gradient(policy, samples, aggregation=aggregation, max_tokens_per_microbatch=size), alone)


def test_in_float32_microbatches_agree_as_well(policy: Path, samples: list[Sample]):
    results = [
        trainer(policy, ONE_STEP, max_tokens_per_microbatch=size).train(samples, iteration=0)
        for size in (1, 64, 100_000)
    ]
    for result in results[1:]:
        assert result["train/loss"] == pytest.approx(results[0]["train/loss"], abs=1e-6)
        assert result["train/grad_norm"] == pytest.approx(results[0]["train/grad_norm"], rel=1e-5)


def test_the_order_of_the_samples_does_not_change_the_gradient(policy: Path, samples: list[Sample]):
    order = np.random.default_rng(0).permutation(len(samples))
    assert_close(gradient(policy, [samples[i] for i in order]), gradient(policy, samples))


def test_tokens_behind_the_last_trained_one_do_not_matter(policy: Path, samples: list[Sample]):
    longer = copy.deepcopy(samples)
    for sample in longer:
        assert sample.loss_mask is not None
        assert sample.rollout_log_probs is not None
        sample.tokens += [7, 8, 9]
        sample.response_length += 3
        sample.loss_mask += [0, 0, 0]
        sample.rollout_log_probs += [0.0, 0.0, 0.0]
    assert_close(gradient(policy, longer), gradient(policy, samples))


def split_rollout(sample: Sample, length: int) -> list[Sample]:
    """Two samples for one rollout: the response up to ``at``, and the rest with all before as its prompt."""
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    first, second = copy.deepcopy(sample), copy.deepcopy(sample)
    first.tokens = sample.tokens[: len(sample.tokens) - sample.response_length + length]
    first.response_length, first.loss_mask, first.rollout_log_probs = (
        length,
        sample.loss_mask[:length],
        sample.rollout_log_probs[:length],
    )
    second.response_length -= length
    second.loss_mask, second.rollout_log_probs = sample.loss_mask[length:], sample.rollout_log_probs[length:]
    return [first, second]


@pytest.mark.parametrize("aggregation", ["token", "rollout"])
def test_a_rollout_in_two_samples_gives_the_gradient_of_the_rollout_in_one(policy: Path, aggregation: str):
    whole = make_samples(make_model(), response_lengths=(6, 20))
    split = [
        part for i, sample in enumerate(whole) for part in (split_rollout(sample, length=3) if i % 2 else [sample])
    ]
    assert len(split) == 18
    assert_close(gradient(policy, split, aggregation=aggregation), gradient(policy, whole, aggregation=aggregation))


@pytest.mark.parametrize("aggregation", ["token", "rollout"])
def test_the_gradients_of_the_minibatches_average_to_that_of_the_batch(
    policy: Path, samples: list[Sample], aggregation: str
):
    # With a vanishing learning rate all minibatches see the same weights.
    minibatches = gradients(policy, samples, aggregation=aggregation, n_minibatches=5, lr=1e-30)
    assert len(minibatches) == 5
    assert_close(torch.stack(minibatches).mean(0), gradient(policy, samples, aggregation=aggregation))


def test_a_group_without_advantage_keeps_its_place_in_the_denominator(policy: Path, samples: list[Sample]):
    flat_group = copy.deepcopy(samples[:4])
    for sample in flat_group:
        sample.reward, sample.group_index, sample.rollout_id = 1.0, 99, 100 + (sample.index or 0)
    tokens = [sum(sample.loss_mask or []) for sample in samples]
    share = sum(tokens) / (sum(tokens) + sum(tokens[:4]))
    assert_close(gradient(policy, samples + flat_group), share * gradient(policy, samples))
