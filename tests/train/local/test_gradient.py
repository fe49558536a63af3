"""The gradient of the local trainer against the loss written down plainly, and what must not change it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import PreTrainedModel  # noqa: E402

from agl_slime.data.normalize import normalize_rewards  # noqa: E402
from agl_slime.types import Sample  # noqa: E402
from tests.harness.trainer_policy import make_model, make_samples  # noqa: E402
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
