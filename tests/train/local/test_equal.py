"""Training equals the papers' formulas however a batch is cut and laid out: against one sample at a time, without
padding, all logits at once."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from agl_slime.data.normalize import normalize_rewards, overlong_penalty  # noqa: E402
from agl_slime.train.local import LocalTrainer, LocalTrainerSettings, TrainBatch  # noqa: E402
from agl_slime.types import Sample, sample_from_fields  # noqa: E402
from tests.harness.examples import examples  # noqa: E402
from tests.harness.trainer_policy import VOCABULARY, make_model, make_samples, save_policy  # noqa: E402
from tests.harness.trainers import ONE_STEP, assert_close, gradient, gradient_of, gradients, recorded_gradients, trainer  # noqa: E402

CLIP, CLIP_HIGH, LONGEST = 0.2, 0.3, 50


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


def plainly(
    model: Any, samples: list[Sample], *, aggregation: str, loss: str = "ppo", kl_coef: float = 0.0, start: Any = None
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss with its graph, and the metrics, sample by sample; every sample a rollout of its own."""
    advantages = normalize_rewards(
        [float(s.reward) for s in samples],  # type: ignore[arg-type]
        group_indices=[s.group_index for s in samples],
        rollout_ids=[s.rollout_id for s in samples],
    )
    n_tokens = sum(sum(s.loss_mask or []) for s in samples)
    total, entropies, differences, clipped, kl = torch.zeros((), dtype=torch.float64), [], [], [], []
    for sample, advantage in zip(samples, advantages, strict=True):
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        if not mask.any():
            continue
        targets = torch.tensor(sample.tokens)[-sample.response_length :][mask].unsqueeze(-1)

        def log_softmax(of_model: Any, sample: Sample = sample, mask: Any = mask) -> torch.Tensor:
            logits = of_model(torch.tensor([sample.tokens])).logits[0, -sample.response_length - 1 : -1]
            return logits.log_softmax(-1)[mask]

        every = log_softmax(model)
        new = every.gather(-1, targets).squeeze(-1)
        old = torch.tensor(sample.rollout_log_probs, dtype=torch.float32)[mask]
        ratio = ((new - old).mean().expand(len(new)) if loss == "gspo" else new - old).exp()
        bounded = ratio.clamp(1 - CLIP, 1 + CLIP_HIGH)
        if loss == "cispo":
            value = bounded.detach() * advantage * new
            clipped += (bounded != ratio).tolist()
        else:
            value = torch.minimum(ratio * advantage, bounded * advantage)
            clipped += (bounded * advantage < ratio * advantage).tolist()
        if kl_coef:
            with torch.no_grad():
                reference = log_softmax(start).gather(-1, targets).squeeze(-1)
            value = value - kl_coef * ((reference - new).exp() - 1 - (reference - new))
        divisor = {"token": n_tokens, "rollout": len(samples) * len(new), "constant": len(samples) * LONGEST}
        total = total - value.sum() / divisor[aggregation]
        entropies += (-(every.exp() * every).sum(-1)).tolist()
        differences += (new - old).abs().tolist()
        kl += ((new - old).exp() - 1 - (new - old)).tolist()
    return total, {
        "train/loss": float(total.detach()),
        "train/entropy": math.fsum(entropies) / n_tokens,
        "train/logprob_diff_max": max(differences),
        "train/logprob_diff_mean": math.fsum(differences) / n_tokens,
        "train/clip_fraction": sum(clipped) / n_tokens,
        "train/kl": math.fsum(kl) / n_tokens,
        "train/tokens": n_tokens,
    }


def halves(sample: Sample) -> list[Sample]:
    """The rollout of ``sample`` in two samples, the second after the first."""
    cut, prompt = sample.response_length // 2, len(sample.tokens) - sample.response_length
    mask, log_probs = sample.loss_mask or [], sample.rollout_log_probs or []
    first = replace(sample, tokens=sample.tokens[: prompt + cut], response_length=cut)
    first.loss_mask, first.rollout_log_probs = mask[:cut], log_probs[:cut]
    second = replace(sample, response_length=sample.response_length - cut)
    second.loss_mask, second.rollout_log_probs = mask[cut:], log_probs[cut:]
    return [first, second]


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, LocalTrainer]:
    """With and without checkpointing, in float64; at this learning rate no step changes anything."""
    policy: Path = save_policy(tmp_path_factory.mktemp("policy"))
    made = {}
    for checkpointing in (False, True):
        settings = LocalTrainerSettings(
            n_minibatches=1,
            grad_clip=math.inf,
            lr=1e-30,
            clip=CLIP,
            clip_high=CLIP_HIGH,
            gradient_checkpointing=checkpointing,
        )
        made[checkpointing] = LocalTrainer(model_path=policy, settings=settings)
        made[checkpointing].model.double()
    return made


@settings(max_examples=examples(50))
@given(
    samples=batches(),
    microbatch=st.sampled_from([1, 64, 100_000]),
    chunk=st.sampled_from([1, 3, 100_000]),
    checkpointing=st.booleans(),
    recompute=st.booleans(),
    loss=st.sampled_from(["ppo", "gspo", "cispo"]),
    aggregation=st.sampled_from(["token", "rollout", "constant"]),
    cut=st.booleans(),
)
def test_loss_gradient_and_metrics_equal_one_sample_at_a_time(
    trainers: dict[bool, LocalTrainer],
    samples: list[Sample],
    microbatch: int,
    chunk: int,
    checkpointing: bool,
    recompute: bool,
    loss: str,
    aggregation: str,
    cut: bool,
):
    ours = trainers[checkpointing]
    changes: dict[str, Any] = {"max_tokens_per_microbatch": microbatch, "loss": loss, "aggregation": aggregation}
    changes |= {"max_response": LONGEST if aggregation == "constant" else 0, "old_log_probs": "engine"}
    ours.settings = replace(ours.settings, **changes)
    batch = [part for sample in samples for part in (halves(sample) if cut and sample.response_length else [sample])]
    model = make_model().double()
    total, expected = plainly(model, samples, loss=loss, aggregation=aggregation)
    total.backward()
    theirs = gradient_of(model)
    with recorded_gradients(ours) as steps, mock.patch("agl_slime.train.local.trainer.LOGITS_CHUNK", chunk):
        metrics = ours.train(batch, iteration=0)
    if recompute:  # the pass before the steps finds the same
        ours.settings = replace(ours.settings, old_log_probs="recompute")
        first = ours.train(batch, iteration=0)
        for name in ("train/entropy", "train/logprob_diff_max", "train/logprob_diff_mean"):
            assert first[name] == pytest.approx(metrics[name], rel=1e-5)
    assert (steps[0] - theirs).norm() <= 1e-5 * theirs.norm() + 1e-9
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert metrics["train/grad_norm"] == pytest.approx(float(theirs.norm()), rel=1e-5, abs=1e-9)


def test_the_gradient_with_kl_is_that_of_the_loss_written_down_plainly(policy: Path):
    samples = make_samples(make_model(), groups=2)
    model, start = make_model().double(), make_model().double()
    ours = trainer(policy, ONE_STEP, kl_coef=0.5, clip=CLIP, clip_high=CLIP_HIGH)
    ours.model.double()
    assert ours._start_model is not None
    ours._start_model.double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # both the same step away from the start policy
        for mine, theirs in zip(model.parameters(), ours.model.parameters(), strict=True):
            mine += 0.01 * torch.randn(mine.shape, generator=generator, dtype=torch.float64)
            theirs.copy_(mine)
    plainly(model, samples, aggregation="token", kl_coef=0.5, start=start)[0].backward()
    with recorded_gradients(ours) as steps:
        assert ours.train(samples, iteration=0)["train/reference_kl"] > 0.01
    assert_close(steps[0], gradient_of(model))


@pytest.mark.parametrize("aggregation", ["token", "rollout"])
def test_the_gradients_of_the_minibatches_average_to_that_of_the_batch(policy, samples, aggregation):
    # With a vanishing learning rate all minibatches see the same weights.
    minibatches = gradients(policy, samples, aggregation=aggregation, n_minibatches=5, lr=1e-30)
    assert len(minibatches) == 5
    assert_close(torch.stack(minibatches).mean(0), gradient(policy, samples, aggregation=aggregation))


def test_the_penalty_counts_the_sampled_tokens_of_the_whole_rollout(policy: Path):
    samples = make_samples(make_model(), groups=1, response_lengths=(8, 20))
    longest = max(sum(s.loss_mask or []) for s in samples)
    settings_of: dict[str, Any] = {"max_response": longest, "overlong_buffer": longest - 1}
    tokens = [sum(s.loss_mask or []) for s in samples]
    penalties = [overlong_penalty(n, longest=longest, buffer=longest - 1) for n in tokens]
    expected = normalize_rewards(
        [float(s.reward) + penalty for s, penalty in zip(samples, penalties, strict=True)],  # type: ignore[arg-type]
        group_indices=[0] * len(samples),
        rollout_ids=list(range(len(samples))),
    )
    parts = [part for sample in samples for part in halves(sample)]
    metrics = trainer(policy, **settings_of).train(parts, iteration=0)
    assert metrics["train/overlong_penalty"] == pytest.approx(sum(penalties) / len(penalties))
    batch = TrainBatch.from_samples(parts, **settings_of)
    by_rollout = dict(zip(batch.token_rollouts.tolist(), batch.token_rewards.tolist(), strict=True))
    assert [by_rollout[i] for i in range(len(samples))] == pytest.approx(expected)
