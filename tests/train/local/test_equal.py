"""Training equals the formulas however a batch is cut and laid out: against one sample at a time, without
padding, all logits at once."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from agl_slime.data.normalize import normalize_rewards  # noqa: E402
from agl_slime.train.local import LocalTrainer, LocalTrainerSettings  # noqa: E402
from agl_slime.types import Sample, sample_from_fields  # noqa: E402
from tests.harness.examples import examples  # noqa: E402
from tests.harness.trainer_policy import VOCABULARY, make_model, save_policy  # noqa: E402

CLIP = 0.2


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    """Prompts of very different lengths, masks of several segments, some empty; at least one token under a mask."""
    samples = []
    token, log_prob = st.integers(0, VOCABULARY - 1), st.floats(-9, -3, width=32)
    lengths = st.one_of(st.integers(1, 6), st.integers(40, 90))
    for group in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(token, min_size=(size := draw(lengths)), max_size=size))
        for _ in range(draw(st.integers(1, 4))):
            segments = draw(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 9)), max_size=5))
            mask = [bit for bit, length in segments for _ in range(length)]
            if not samples:
                mask.append(1)
            # it may begin as an answer before it does, or be the same
            answer = draw(st.sampled_from(samples)).tokens[len(prompt) :] if samples else []
            prefix = answer[: draw(st.integers(0, len(mask)))]
            samples.append(
                sample_from_fields(
                    group_index=group,
                    rollout_id=len(samples),
                    tokens=prompt + prefix + [draw(token) for _ in mask[len(prefix) :]],
                    response_length=len(mask),
                    loss_mask=mask,
                    rollout_log_probs=[draw(log_prob) for _ in mask],
                    reward=float(draw(st.integers(0, 2))),
                )
            )
    return samples


def plainly(model: Any, samples: list[Sample], aggregation: str) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss with its graph, and the metrics, sample by sample."""
    advantages = normalize_rewards(
        [float(s.reward) for s in samples],  # type: ignore[arg-type]
        group_indices=[s.group_index for s in samples],
        rollout_ids=[s.rollout_id for s in samples],
    )
    n_tokens = sum(sum(s.loss_mask or []) for s in samples)
    loss, entropies, differences, clipped, kl = torch.zeros((), dtype=torch.float64), [], [], [], []
    for sample, advantage in zip(samples, advantages, strict=True):
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        if not mask.any():
            continue
        responses = torch.tensor(sample.tokens)[-sample.response_length :]
        every = model(torch.tensor([sample.tokens])).logits[0, -sample.response_length - 1 : -1].log_softmax(-1)[mask]
        new = every.gather(-1, responses[mask].unsqueeze(-1)).squeeze(-1)
        old = torch.tensor(sample.rollout_log_probs, dtype=torch.float32)[mask]
        ratio = (new - old).exp()
        bounded = ratio.clamp(1 - CLIP, 1 + CLIP) * advantage
        weight = 1 / n_tokens if aggregation == "token" else 1 / (len(samples) * int(mask.sum()))
        loss = loss - weight * torch.minimum(ratio * advantage, bounded).sum()
        entropies += (-(every.exp() * every).sum(-1)).tolist()
        differences += (new - old).abs().tolist()
        clipped += (bounded < ratio * advantage).tolist()
        kl += ((new - old).exp() - 1 - (new - old)).tolist()
    return loss, {
        "train/loss": float(loss.detach()),
        "train/entropy": math.fsum(entropies) / n_tokens,
        "train/logprob_diff_max": max(differences),
        "train/logprob_diff_mean": math.fsum(differences) / n_tokens,
        "train/clip_fraction": sum(clipped) / n_tokens,
        "train/kl": math.fsum(kl) / n_tokens,
        "train/tokens": n_tokens,
    }


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, LocalTrainer]:
    """With and without checkpointing, in float64; at this learning rate no step changes anything."""
    policy: Path = save_policy(tmp_path_factory.mktemp("policy"))
    made = {}
    for checkpointing in (False, True):
        settings = LocalTrainerSettings(
            n_minibatches=1, grad_clip=math.inf, lr=1e-30, clip=CLIP, gradient_checkpointing=checkpointing
        )
        made[checkpointing] = LocalTrainer(model_path=policy, settings=settings)
        made[checkpointing].model.double()
    return made


@settings(max_examples=examples(30))
@given(
    samples=batches(),
    microbatch=st.sampled_from([1, 64, 100_000]),
    chunk=st.sampled_from([1, 3, 100_000]),
    checkpointing=st.booleans(),
    recompute=st.booleans(),
    aggregation=st.sampled_from(["token", "rollout"]),
)
def test_loss_gradient_and_metrics_equal_one_sample_at_a_time(
    trainers: dict[bool, LocalTrainer],
    samples: list[Sample],
    microbatch: int,
    chunk: int,
    checkpointing: bool,
    recompute: bool,
    aggregation: str,
):
    ours = trainers[checkpointing]
    changes: dict[str, Any] = {"max_tokens_per_microbatch": microbatch, "aggregation": aggregation}
    ours.settings = replace(ours.settings, **changes)
    gradients: list[torch.Tensor] = []

    def record(*_: Any) -> None:
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in ours.model.parameters()]))

    model = make_model().double()
    loss, expected = plainly(model, samples, aggregation)
    loss.backward()
    theirs = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    hook = ours._optimizer.register_step_pre_hook(record)
    try:
        with mock.patch("agl_slime.train.local.trainer.LOGITS_CHUNK", chunk):
            metrics = ours.train(samples, iteration=0)
        if recompute:  # the pass before the steps finds the same
            ours.settings = replace(ours.settings, old_log_probs="recompute")
            first = ours.train(samples, iteration=0)
            for name in ("train/entropy", "train/logprob_diff_max", "train/logprob_diff_mean"):
                assert first[name] == pytest.approx(metrics[name], rel=1e-5)
    finally:
        hook.remove()
        ours.settings = replace(ours.settings, old_log_probs="engine")
    assert (gradients[0] - theirs).norm() <= 1e-5 * theirs.norm() + 1e-9
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert metrics["train/grad_norm"] == pytest.approx(float(theirs.norm()), rel=1e-5, abs=1e-9)
