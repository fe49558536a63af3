"""The local trainer: its metrics of a batch, the batches it refuses, its steps, and that it learns."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from agl_slime.errors import ConfigError, TrainerError  # noqa: E402
from agl_slime.loop.trainer import HasTokenScores, Trainer  # noqa: E402
from agl_slime.train.local import LocalTrainerSettings, TrainBatch  # noqa: E402
from agl_slime.types import Sample  # noqa: E402
from tests.harness.trainer_policy import VOCABULARY, make_model, make_samples  # noqa: E402
from tests.harness.trainers import ONE_STEP, flat, gradient, trainer, weights  # noqa: E402

# -- metrics and the checks on a batch -------------------------------------------------------------------------------


def test_the_first_batch_agrees_with_the_engine_and_is_counted(policy: Path, samples: list[Sample]):
    ours = trainer(policy)
    assert isinstance(ours, Trainer)
    metrics = ours.train(samples, iteration=0)
    assert set(metrics) == {
        "train/loss",
        "train/log_ratio_clamped",
        "train/logprob_diff_max",
        "train/logprob_diff_mean",
        "train/first_ratio_dev_max",
        "train/grad_norm",
        "train/clip_fraction",
        "train/kl",
        "train/engine_kl",
        "train/entropy",
        "train/tokens",
        "train/samples",
        "train/rollouts",
        "train/steps",
        "train/lr",
        "train/seconds",
    }
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["train/logprob_diff_max"] < 1e-5
    assert 0 < metrics["train/logprob_diff_mean"] <= metrics["train/logprob_diff_max"]
    assert metrics["train/first_ratio_dev_max"] < 1e-5
    assert metrics["train/tokens"] == sum(sum(sample.loss_mask or []) for sample in samples)
    assert (metrics["train/samples"], metrics["train/rollouts"], metrics["train/steps"]) == (12, 12, 4)
    assert 0 < metrics["train/entropy"] < math.log(VOCABULARY)


def test_it_tells_the_log_prob_and_the_advantage_of_each_trained_token(policy: Path, samples: list[Sample]):
    local = trainer(policy, n_minibatches=1)
    assert isinstance(local, HasTokenScores)
    assert local.scores is None
    metrics = local.train(samples, iteration=0)
    scores = local.scores
    assert scores is not None
    engine = [
        [p for p, mask in zip(s.rollout_log_probs or (), s.loss_mask or (), strict=True) if mask] for s in samples
    ]
    differences = [np.abs(ours - theirs).max() for ours, theirs in zip(scores.log_probs, engine, strict=True) if theirs]
    assert max(differences) == pytest.approx(metrics["train/logprob_diff_max"])
    assert [len(row) for row in scores.advantages] == [len(theirs) for theirs in engine]
    batch = TrainBatch.from_samples(samples)
    assert np.concatenate(scores.advantages) == pytest.approx(batch.token_rewards)


def test_a_mask_that_is_off_by_one_shows_in_the_log_prob_difference(policy: Path):
    samples = make_samples(make_model(), observations=True, response_lengths=(6, 20))
    for sample in samples:
        assert sample.loss_mask is not None
        sample.loss_mask = [*sample.loss_mask[1:], sample.loss_mask[0]]
    assert trainer(policy).train(samples, iteration=0)["train/logprob_diff_max"] > 1.0


def test_log_probs_are_taken_at_the_temperature_of_the_rollouts(policy: Path):
    samples = make_samples(make_model(), temperature=0.7)
    metrics = trainer(policy, temperature=0.7).train(samples, iteration=0)
    assert metrics["train/logprob_diff_max"] < 1e-5
    assert metrics["train/first_ratio_dev_max"] < 1e-5
    assert trainer(policy, temperature=1.0).train(samples, iteration=0)["train/logprob_diff_max"] > 1e-2


def test_dropout_is_off(samples: list[Sample], tmp_path: Path):
    make_model(attention_dropout=0.5).save_pretrained(tmp_path)
    metrics = trainer(tmp_path).train(samples, iteration=0)
    assert metrics["train/logprob_diff_max"] < 1e-5
    assert metrics["train/first_ratio_dev_max"] < 1e-5


def test_recomputed_log_probs_make_the_first_ratio_one(policy: Path):
    stale = make_samples(make_model(seed=1))  # sampled from another policy
    engine = trainer(policy, ONE_STEP, old_log_probs="engine").train(stale, iteration=0)
    recomputed = trainer(policy, ONE_STEP, old_log_probs="recompute").train(stale, iteration=0)
    assert engine["train/logprob_diff_max"] == pytest.approx(recomputed["train/logprob_diff_max"], rel=1e-5)
    assert recomputed["train/logprob_diff_max"] > 0.1
    assert engine["train/first_ratio_dev_max"] > 0.1
    assert recomputed["train/first_ratio_dev_max"] < 1e-5


def test_a_batch_without_log_probs_needs_them_recomputed(policy: Path, samples: list[Sample]):
    bare = copy.deepcopy(samples)
    for sample in bare:
        sample.rollout_log_probs = None
    with pytest.raises(TrainerError, match="old_log_probs='recompute'"):
        trainer(policy).train(bare, iteration=0)
    metrics = trainer(policy, old_log_probs="recompute").train(bare, iteration=0)
    assert "train/logprob_diff_max" not in metrics
    assert metrics["train/first_ratio_dev_max"] < 1e-5


def test_a_minibatch_without_trained_tokens_takes_no_step(policy: Path, samples: list[Sample]):
    group = copy.deepcopy(samples[:4])
    for sample in group[1:]:
        sample.remove_sample = True
    metrics = trainer(policy, n_minibatches=4).train(group, iteration=0)
    assert metrics["train/steps"] == 1
    assert metrics["train/tokens"] == sum(group[0].loss_mask or [])


def test_a_batch_that_cannot_be_trained_on_is_refused(policy: Path, samples: list[Sample]):
    removed, broken, with_image = (copy.deepcopy(samples) for _ in range(3))
    for sample in removed:
        sample.remove_sample = True
    broken[2].tokens[0] = VOCABULARY
    with_image[3].multimodal_train_inputs = {"pixels": 1}
    ours = trainer(policy)
    for batch, iteration, message in (
        (removed, 0, "none of the 12 samples"),
        (broken, 0, f"tokens of sample 2 .* {VOCABULARY}"),
        (with_image, 0, "sample 3 has images; use slime"),
        (samples, -1, "iteration is -1"),
    ):
        with pytest.raises(TrainerError, match=message):
            ours.train(batch, iteration=iteration)


# -- steps -----------------------------------------------------------------------------------------------------------


def test_steps_equal_adamws(policy: Path, samples: list[Sample]):
    settings = LocalTrainerSettings(lr=1e-2, warmup_steps=3, betas=(0.5, 0.8), weight_decay=0.1, grad_clip=0.2)
    ours = trainer(policy, settings)
    gradients: list[list[torch.Tensor]] = []
    ours._optimizer.register_step_pre_hook(
        lambda *_: gradients.append([parameter.grad.clone() for parameter in ours.model.parameters()])
    )
    ours.train(samples, iteration=0)

    expected = []
    for i, parameter in enumerate(make_model().parameters()):
        value, mean, square = parameter.detach().double(), 0.0, 0.0
        for step in range(1, 5):
            lr, grad = 1e-2 * min(1.0, step / 3), gradients[step - 1][i].double()
            mean, square = 0.5 * mean + 0.5 * grad, 0.8 * square + 0.2 * grad**2
            decay = 0.1 if value.ndim >= 2 else 0.0
            value = value * (1 - lr * decay) - lr * (mean / (1 - 0.5**step)) / (
                (square / (1 - 0.8**step)).sqrt() + 1e-8
            )
        expected.append(value)
    assert len(gradients) == 4
    moved = flat([parameter.detach().double() for parameter in ours.model.parameters()])
    assert (moved - flat(expected)).abs().max() < 1e-5


def test_rollouts_are_divided_again_in_every_iteration_and_epoch(policy: Path, samples: list[Sample]):
    def first_minibatch(iteration: int) -> list[torch.Tensor]:
        ours = trainer(policy, epochs=2, n_minibatches=2, lr=1e-30)
        gradients: list[torch.Tensor] = []
        ours._optimizer.register_step_pre_hook(
            lambda *_: gradients.append(flat([parameter.grad.clone() for parameter in ours.model.parameters()]))
        )
        ours.train(samples, iteration=iteration)
        return [gradients[0], gradients[2]]  # of the first epoch and of the second

    here, second, next_iteration = first_minibatch(0), first_minibatch(0), first_minibatch(1)
    assert torch.equal(here[0], second[0])
    assert torch.equal(here[1], second[1])
    assert not torch.equal(here[0], here[1])
    assert not torch.equal(here[0], next_iteration[0])


def test_epochs_and_minibatches_make_the_steps(policy: Path, samples: list[Sample]):
    ours = trainer(policy, epochs=2, n_minibatches=3)
    metrics = ours.train(samples, iteration=0)
    assert metrics["train/steps"] == ours.steps == 6
    assert metrics["train/tokens"] == sum(sum(sample.loss_mask or []) for sample in samples)  # of one epoch
    assert trainer(policy, n_minibatches=8).train(samples[:4], iteration=0)["train/steps"] == 4  # of four rollouts


def test_the_learning_rate_warms_up_and_stays(policy: Path, samples: list[Sample]):
    ours = trainer(policy, n_minibatches=2, warmup_steps=4, lr=1e-3)
    assert [ours.train(samples, iteration=i)["train/lr"] for i in range(3)] == pytest.approx([5e-4, 1e-3, 1e-3])


def test_the_gradient_is_clipped(policy: Path, samples: list[Sample]):
    assert gradient(policy, samples, grad_clip=0.05).norm().item() == pytest.approx(0.05, rel=1e-4)


def test_without_advantage_and_momentum_nothing_moves(policy: Path, samples: list[Sample]):
    equal = copy.deepcopy(samples)
    for sample in equal:
        sample.reward = 1.0
    ours = trainer(policy)
    old_weights = weights(ours.model)
    metrics = ours.train(equal, iteration=0)
    assert metrics["train/loss"] == metrics["train/grad_norm"] == 0.0
    assert all(torch.equal(tensor, old_weights[name]) for name, tensor in weights(ours.model).items())


def test_the_kl_term_holds_the_policy_near_its_start(policy: Path, samples: list[Sample]):
    def drift(kl_coef: float) -> float:
        ours = trainer(policy, kl_coef=kl_coef)
        return [ours.train(samples, iteration=i) for i in range(6)][-1]["train/reference_kl"]

    assert drift(10.0) < 0.5 * drift(1e-9)


def test_the_same_seed_trains_alike_and_another_divides_otherwise(policy: Path, samples: list[Sample]):
    def trained(seed: int) -> torch.Tensor:
        ours = trainer(policy, seed=seed)
        ours.train(samples, iteration=0)
        return flat(list(ours.model.parameters())).detach()

    assert torch.equal(trained(0), trained(0))
    assert not torch.equal(trained(0), trained(1))


@pytest.mark.parametrize("broken", ["loss", "gradient norm"])
def test_a_number_that_is_not_finite_takes_no_step(policy: Path, samples: list[Sample], broken: str):
    ours = trainer(policy)
    old_weights, head = weights(ours.model), ours.model.get_output_embeddings()
    if broken == "loss":
        handle = head.register_forward_hook(lambda layer, inputs, logits: logits * math.nan)
    else:
        handle = head.weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(TrainerError, match=f"{broken} of minibatch 1 of iteration 3"):
        ours.train(samples, iteration=3)
    handle.remove()
    assert (ours.steps, ours.iteration) == (0, -1)
    assert all(torch.equal(tensor, old_weights[name]) for name, tensor in weights(ours.model).items())
    fresh = trainer(policy)  # nothing of the bad gradient stays
    assert ours.train(samples, iteration=3)["train/loss"] == fresh.train(samples, iteration=3)["train/loss"]


# -- learning --------------------------------------------------------------------------------------------------------


def test_sampling_and_training_in_turn_raises_the_reward(policy: Path):
    # One-token answers; the 46 smallest of the 460 ids earn a reward.
    ours = trainer(policy, lr=5e-3)
    generator = torch.Generator().manual_seed(0)
    means = []
    for iteration in range(15):
        samples = []
        for group, prompt in enumerate([[1, 2, 3], [40, 50, 60, 70], [200, 100], [300]]):
            with torch.no_grad():
                log_probs = ours.model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
            for token in torch.multinomial(log_probs.exp(), 16, replacement=True, generator=generator).tolist():
                sample = Sample(group_index=group, index=len(samples), tokens=[*prompt, token], response_length=1)
                sample.reward, sample.loss_mask, sample.rollout_log_probs = (
                    float(token < 46),
                    [1],
                    [log_probs[token].item()],
                )
                samples.append(sample)
        means.append(sum(float(sample.reward) for sample in samples) / len(samples))  # type: ignore[arg-type]
        ours.train(samples, iteration=iteration)
    assert means[0] < 0.3
    assert means[-1] > 0.8


# -- devices ---------------------------------------------------------------------------------------------------------


def test_an_unusable_device_is_refused(policy: Path):
    with pytest.raises(ConfigError, match="device is 'cuda:99'"):
        trainer(policy, device="cuda:99")
    with pytest.raises(ConfigError, match="device is 'gpu'"):
        trainer(policy, device="gpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_trains_on_cuda(policy: Path, samples: list[Sample]):
    metrics = trainer(policy, device="cuda").train(samples, iteration=0)
    assert metrics["train/logprob_diff_max"] < 1e-3
    assert math.isfinite(metrics["train/loss"])
