from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from agl_slime.errors import ConfigError, TrainerError  # noqa: E402
from agl_slime.groups.normalize import normalize_rewards  # noqa: E402
from agl_slime.trainers import LocalTrainer, LocalTrainerSettings, TrainBatch, Trainer  # noqa: E402
from agl_slime.trainers.base import TellsTokens  # noqa: E402
from agl_slime.types import Sample  # noqa: E402
from tests.trainer_policy import VOCABULARY, make_model, make_samples, response_log_probs, save_policy  # noqa: E402

# One step on the whole batch and no clipping of the gradient: what the formulas say, without the rest.
ONE_STEP = LocalTrainerSettings(n_minibatches=1, grad_clip=math.inf)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return make_samples(make_model())


def trainer(policy: Path, settings: LocalTrainerSettings | None = None, **changes: Any) -> LocalTrainer:
    return LocalTrainer(model_path=policy, settings=replace(settings or LocalTrainerSettings(), **changes))


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def gradients(
    policy: Path, batch: Any, settings: LocalTrainerSettings = ONE_STEP, **changes: Any
) -> list[torch.Tensor]:
    """The gradient of each step of one ``train``, computed in float64 and flattened."""
    ours = trainer(policy, settings, **changes)
    ours.model.double()
    seen: list[torch.Tensor] = []

    def record(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        seen.append(flat([parameter.grad.clone() for parameter in ours.model.parameters()]))

    ours._optimizer.register_step_pre_hook(record)
    ours.train(batch, iteration=0)
    return seen


def gradient(policy: Path, batch: Any, settings: LocalTrainerSettings = ONE_STEP, **changes: Any) -> torch.Tensor:
    (only,) = gradients(policy, batch, settings, **changes)
    return only


def assert_close(ours: torch.Tensor, other: torch.Tensor, *, tolerance: float = 1e-6) -> None:
    assert other.norm() > 1e-3  # or equality would say little
    assert (ours - other).norm() <= tolerance * other.norm()


# -- metrics and the checks on a batch -------------------------------------------------------------------------------


def test_it_is_a_trainer(policy: Path):
    assert isinstance(trainer(policy), Trainer)


def test_the_first_batch_agrees_with_the_engine_and_is_counted(policy: Path, samples: list[Sample]):
    metrics = trainer(policy).train(samples, iteration=0)
    assert set(metrics) == {
        "train/loss",
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
    assert isinstance(local, TellsTokens)
    assert local.scores is None
    metrics = local.train(samples, iteration=0)
    scores = local.scores
    assert scores is not None
    engine = [[p for p, own in zip(s.rollout_log_probs or (), s.loss_mask or (), strict=True) if own] for s in samples]
    differences = [np.abs(own - theirs).max() for own, theirs in zip(scores.log_probs, engine, strict=True) if theirs]
    assert max(differences) == pytest.approx(metrics["train/logprob_diff_max"])
    assert [len(own) for own in scores.advantages] == [len(theirs) for theirs in engine]
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
    own = trainer(policy, ONE_STEP, old_log_probs="recompute").train(stale, iteration=0)
    assert engine["train/logprob_diff_max"] == pytest.approx(own["train/logprob_diff_max"], rel=1e-5)
    assert own["train/logprob_diff_max"] > 0.1
    assert engine["train/first_ratio_dev_max"] > 0.1
    assert own["train/first_ratio_dev_max"] < 1e-5


def test_a_batch_without_log_probs_needs_them_recomputed(policy: Path, samples: list[Sample]):
    bare = copy.deepcopy(samples)
    for sample in bare:
        sample.rollout_log_probs = None
    with pytest.raises(TrainerError, match="old_log_probs='recompute'"):
        trainer(policy).train(bare, iteration=0)
    metrics = trainer(policy, old_log_probs="recompute").train(bare, iteration=0)
    assert "train/logprob_diff_max" not in metrics
    assert metrics["train/first_ratio_dev_max"] < 1e-5


def test_a_batch_with_nothing_to_train_on_is_refused(policy: Path, samples: list[Sample]):
    removed = copy.deepcopy(samples)
    for sample in removed:
        sample.remove_sample = True
    with pytest.raises(TrainerError, match="none of the 12 samples"):
        trainer(policy).train(removed, iteration=0)


def test_a_minibatch_without_trained_tokens_takes_no_step(policy: Path, samples: list[Sample]):
    one = copy.deepcopy(samples[:4])
    for sample in one[1:]:
        sample.remove_sample = True
    metrics = trainer(policy, n_minibatches=4).train(one, iteration=0)
    assert metrics["train/steps"] == 1
    assert metrics["train/tokens"] == sum(one[0].loss_mask or [])


def test_ids_outside_the_vocabulary_are_refused(policy: Path, samples: list[Sample]):
    broken = copy.deepcopy(samples)
    broken[2].tokens[0] = VOCABULARY
    with pytest.raises(TrainerError, match=f"tokens of sample 2 .* {VOCABULARY}"):
        trainer(policy).train(broken, iteration=0)


def test_images_are_refused(policy: Path, samples: list[Sample]):
    with_image = copy.deepcopy(samples)
    with_image[3].multimodal_train_inputs = {"pixels": 1}
    with pytest.raises(TrainerError, match="sample 3 has multimodal_train_inputs"):
        trainer(policy).train(with_image, iteration=0)


def test_a_negative_iteration_is_refused(policy: Path, samples: list[Sample]):
    with pytest.raises(TrainerError, match="iteration is -1"):
        trainer(policy).train(samples, iteration=-1)


# -- the gradient ----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
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
    seen: list[torch.Tensor] = []
    ours._optimizer.register_step_pre_hook(
        lambda *_: seen.append(flat([parameter.grad.clone() for parameter in ours.model.parameters()]))
    )
    assert ours.train(samples, iteration=0)["train/kl_start"] > 0.01
    assert_close(seen[0], flat([parameter.grad for parameter in model.parameters() if parameter.grad is not None]))


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
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


def split_rollout(sample: Sample, at: int) -> list[Sample]:
    """Two samples for one rollout: the response up to ``at``, and the rest with all before as its prompt."""
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    first, second = copy.deepcopy(sample), copy.deepcopy(sample)
    first.tokens = sample.tokens[: len(sample.tokens) - sample.response_length + at]
    first.response_length, first.loss_mask, first.rollout_log_probs = (
        at,
        sample.loss_mask[:at],
        sample.rollout_log_probs[:at],
    )
    second.response_length -= at
    second.loss_mask, second.rollout_log_probs = sample.loss_mask[at:], sample.rollout_log_probs[at:]
    return [first, second]


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_a_rollout_in_two_samples_gives_the_gradient_of_the_rollout_in_one(policy: Path, aggregation: str):
    whole = make_samples(make_model(), response_lengths=(6, 20))
    split = [part for i, sample in enumerate(whole) for part in (split_rollout(sample, at=3) if i % 2 else [sample])]
    assert len(split) == 18
    assert_close(gradient(policy, split, aggregation=aggregation), gradient(policy, whole, aggregation=aggregation))


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_the_gradients_of_the_minibatches_average_to_that_of_the_batch(
    policy: Path, samples: list[Sample], aggregation: str
):
    # With a vanishing learning rate all minibatches see the same weights.
    parts = gradients(policy, samples, aggregation=aggregation, n_minibatches=5, lr=1e-30)
    assert len(parts) == 5
    assert_close(torch.stack(parts).mean(0), gradient(policy, samples, aggregation=aggregation))


def test_a_group_without_advantage_keeps_its_place_in_the_denominator(policy: Path, samples: list[Sample]):
    flat_group = copy.deepcopy(samples[:4])
    for sample in flat_group:
        sample.reward, sample.group_index, sample.rollout_id = 1.0, 99, 100 + (sample.index or 0)
    tokens = [sum(sample.loss_mask or []) for sample in samples]
    share = sum(tokens) / (sum(tokens) + sum(tokens[:4]))
    assert_close(gradient(policy, samples + flat_group), share * gradient(policy, samples))


# -- steps -----------------------------------------------------------------------------------------------------------


def test_the_steps_are_those_of_adamw(policy: Path, samples: list[Sample]):
    settings = LocalTrainerSettings(lr=1e-2, warmup_steps=3, betas=(0.5, 0.8), weight_decay=0.1, grad_clip=0.2)
    ours = trainer(policy, settings)
    seen: list[list[torch.Tensor]] = []
    ours._optimizer.register_step_pre_hook(
        lambda *_: seen.append([parameter.grad.clone() for parameter in ours.model.parameters()])
    )
    ours.train(samples, iteration=0)

    expected = []
    for i, parameter in enumerate(make_model().parameters()):
        value, mean, square = parameter.detach().double(), 0.0, 0.0
        for step in range(1, 5):
            lr, grad = 1e-2 * min(1.0, step / 3), seen[step - 1][i].double()
            mean, square = 0.5 * mean + 0.5 * grad, 0.8 * square + 0.2 * grad**2
            decay = 0.1 if value.ndim >= 2 else 0.0
            value = value * (1 - lr * decay) - lr * (mean / (1 - 0.5**step)) / (
                (square / (1 - 0.8**step)).sqrt() + 1e-8
            )
        expected.append(value)
    assert len(seen) == 4
    moved = flat([parameter.detach().double() for parameter in ours.model.parameters()])
    assert (moved - flat(expected)).abs().max() < 1e-5


def test_every_iteration_and_epoch_divides_the_rollouts_anew(policy: Path, samples: list[Sample]):
    def first_minibatch(iteration: int) -> list[torch.Tensor]:
        ours = trainer(policy, epochs=2, n_minibatches=2, lr=1e-30)
        seen: list[torch.Tensor] = []
        ours._optimizer.register_step_pre_hook(
            lambda *_: seen.append(flat([parameter.grad.clone() for parameter in ours.model.parameters()]))
        )
        ours.train(samples, iteration=iteration)
        return [seen[0], seen[2]]  # of the first epoch and of the second

    here, again, next_iteration = first_minibatch(0), first_minibatch(0), first_minibatch(1)
    assert torch.equal(here[0], again[0])
    assert torch.equal(here[1], again[1])
    assert not torch.equal(here[0], here[1])
    assert not torch.equal(here[0], next_iteration[0])


def test_epochs_and_minibatches_make_the_steps(policy: Path, samples: list[Sample]):
    ours = trainer(policy, epochs=2, n_minibatches=3)
    metrics = ours.train(samples, iteration=0)
    assert metrics["train/steps"] == ours.steps == 6
    assert metrics["train/tokens"] == sum(sum(sample.loss_mask or []) for sample in samples)  # of one epoch


def test_fewer_rollouts_than_minibatches(policy: Path, samples: list[Sample]):
    assert trainer(policy, n_minibatches=8).train(samples[:4], iteration=0)["train/steps"] == 4


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
    before = weights(ours.model)
    metrics = ours.train(equal, iteration=0)
    assert metrics["train/loss"] == metrics["train/grad_norm"] == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(ours.model).items())


def test_the_kl_term_holds_the_policy_near_its_start(policy: Path, samples: list[Sample]):
    def drift(kl_coef: float) -> float:
        ours = trainer(policy, kl_coef=kl_coef)
        return [ours.train(samples, iteration=i) for i in range(6)][-1]["train/kl_start"]

    assert drift(10.0) < 0.5 * drift(1e-9)


def test_the_same_seed_trains_alike_and_another_divides_otherwise(policy: Path, samples: list[Sample]):
    def trained(seed: int) -> torch.Tensor:
        ours = trainer(policy, seed=seed)
        ours.train(samples, iteration=0)
        return flat(list(ours.model.parameters())).detach()

    assert torch.equal(trained(0), trained(0))
    assert not torch.equal(trained(0), trained(1))


def test_a_loss_that_is_not_finite_takes_no_step(policy: Path, samples: list[Sample]):
    broken = copy.deepcopy(samples)
    for sample in broken:
        sample.rollout_log_probs = [-1e4] * sample.response_length  # the ratio overflows
    ours = trainer(policy)
    before = weights(ours.model)
    with pytest.raises(TrainerError, match="loss of minibatch 1 of iteration 3"):
        ours.train(broken, iteration=3)
    assert (ours.steps, ours.iteration) == (0, -1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(ours.model).items())
    assert math.isfinite(ours.train(samples, iteration=3)["train/loss"])


def test_a_gradient_that_is_not_finite_takes_no_step(policy: Path, samples: list[Sample]):
    ours = trainer(policy)
    before = weights(ours.model)
    handle = ours.model.get_output_embeddings().weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(TrainerError, match="gradient norm of minibatch 1 of iteration 0"):
        ours.train(samples, iteration=0)
    handle.remove()
    assert ours.steps == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(ours.model).items())
    # Nothing of the bad gradient is left behind.
    fresh = trainer(policy)
    assert ours.train(samples, iteration=0)["train/loss"] == fresh.train(samples, iteration=0)["train/loss"]


# -- learning --------------------------------------------------------------------------------------------------------


def test_rewarded_responses_become_likelier_and_the_others_less(policy: Path):
    ours = trainer(policy)
    samples = make_samples(ours.model, observations=False)

    def mean_log_prob(reward: float) -> float:
        values = [
            v
            for s in samples
            if s.reward == reward
            for v in response_log_probs(ours.model, s.tokens, s.response_length)
        ]
        return sum(values) / len(values)

    before = mean_log_prob(1.0), mean_log_prob(0.0)
    for iteration in range(5):
        for sample in samples:
            sample.rollout_log_probs = response_log_probs(ours.model, sample.tokens, sample.response_length)
        assert ours.train(samples, iteration=iteration)["train/logprob_diff_max"] < 1e-5
    after = mean_log_prob(1.0), mean_log_prob(0.0)
    assert after[0] > before[0] + 0.5
    assert after[1] < before[1]


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


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_the_weights_are_a_checkpoint_with_the_files_of_its_source(policy: Path, samples: list[Sample], tmp_path: Path):
    ours = trainer(policy)
    ours.train(samples, iteration=0)
    ours.save_weights(tmp_path / "weight_v000001")
    assert sorted(path.name for path in (tmp_path / "weight_v000001").iterdir()) == sorted(
        path.name for path in policy.iterdir()
    )
    for name in ("config.json", "tokenizer_config.json"):
        assert (tmp_path / "weight_v000001" / name).read_bytes() == (policy / name).read_bytes()
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "weight_v000001", dtype=torch.float32)
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in weights(ours.model).items())
    assert not torch.equal(flat(list(read.parameters())), flat(list(make_model().parameters())))


def test_what_tells_how_the_source_was_made_stays_behind(tmp_path: Path):
    source = save_policy(tmp_path / "source")
    (source / "agl_slime_policy.json").write_text("{}")
    (source / "model.safetensors.index.json").write_text("{}")
    (source / "logs").mkdir()
    ours = trainer(source)
    ours.save_weights(tmp_path / "weights")
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer_config.json",
    ]


def test_weights_replace_former_ones(policy: Path, samples: list[Sample], tmp_path: Path):
    ours = trainer(policy)
    ours.save_weights(tmp_path / "weights")
    ours.train(samples, iteration=0)
    ours.save_weights(tmp_path / "weights")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float32)
    assert torch.equal(flat(list(read.parameters())), flat(list(ours.model.parameters())))
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def test_saving_prints_nothing(policy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    trainer(policy).save_weights(tmp_path / "weights")
    assert capfd.readouterr() == ("", "")


def test_a_place_that_cannot_be_written_is_named(policy: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    ours = trainer(policy)
    with pytest.raises(TrainerError, match="file/weights"):
        ours.save_weights(tmp_path / "file" / "weights")
    with pytest.raises(TrainerError, match="file/state"):
        ours.save(tmp_path / "file" / "state")


def untimed(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name != "train/seconds"}


def test_training_goes_on_after_load_bit_for_bit(policy: Path, samples: list[Sample], tmp_path: Path):
    settings = LocalTrainerSettings(warmup_steps=10, kl_coef=0.1, weight_decay=0.01, seed=3)
    straight = trainer(policy, settings)
    for iteration in range(2):
        straight.train(samples, iteration=iteration)
    straight.save(tmp_path / "state")
    expected = [untimed(straight.train(samples, iteration=iteration)) for iteration in (2, 3)]

    resumed = trainer(policy, settings)
    resumed.load(tmp_path / "state")
    assert (resumed.iteration, resumed.steps) == (1, 8)
    assert [untimed(resumed.train(samples, iteration=iteration)) for iteration in (2, 3)] == expected
    assert all(torch.equal(tensor, weights(resumed.model)[name]) for name, tensor in weights(straight.model).items())


def test_load_brings_the_seed_along_but_not_the_learning_rate(policy: Path, samples: list[Sample], tmp_path: Path):
    first = trainer(policy, seed=3)
    first.train(samples, iteration=0)
    first.save(tmp_path / "state")
    second = trainer(policy, seed=4, lr=1e-5)
    second.load(tmp_path / "state")
    assert second._seed == 3
    assert second.train(samples, iteration=1)["train/lr"] == 1e-5


def test_a_saved_state_is_a_checkpoint_as_well(policy: Path, tmp_path: Path):
    trainer(policy).save(tmp_path / "state")
    assert trainer(tmp_path / "state").iteration == -1


def test_loading_what_is_not_there_or_broken_changes_nothing(policy: Path, samples: list[Sample], tmp_path: Path):
    ours = trainer(policy)
    before = weights(ours.model)
    with pytest.raises(TrainerError, match=r"trainer_state\.pt does not exist"):
        ours.load(tmp_path)
    ours.save(tmp_path / "state")
    whole = (tmp_path / "state" / "trainer_state.pt").read_bytes()
    (tmp_path / "state" / "trainer_state.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TrainerError, match="cannot be read"):
        ours.load(tmp_path / "state")
    (tmp_path / "state" / "trainer_state.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(TrainerError, match="cannot be read"):
        ours.load(tmp_path / "state")
    torch.save({"format": 0}, tmp_path / "state" / "trainer_state.pt")
    with pytest.raises(TrainerError, match="format"):
        ours.load(tmp_path / "state")
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(ours.model).items())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "holds no config.json"),
        ("{", "cannot be loaded"),
        ('{"model_type": "no_such_model"}', "cannot be loaded"),
    ],
)
def test_a_model_path_without_a_usable_checkpoint_is_refused(tmp_path: Path, content: str | None, message: str):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        LocalTrainer(model_path=tmp_path)


def test_a_checkpoint_that_lacks_weights_is_refused(policy: Path, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    trainer(policy).save_weights(tmp_path / "weights")
    tensors = load_file(tmp_path / "weights" / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "weights" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 weights .* model\.norm\.weight"):
        trainer(tmp_path / "weights")


def test_a_truncated_checkpoint_is_refused(policy: Path, tmp_path: Path):
    trainer(policy).save_weights(tmp_path / "weights")
    whole = (tmp_path / "weights" / "model.safetensors").read_bytes()
    (tmp_path / "weights" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        trainer(tmp_path / "weights")


def test_the_state_of_another_model_is_refused(policy: Path, tmp_path: Path):
    other = make_model().config
    other.num_hidden_layers, other.layer_types = 1, ["full_attention"]
    AutoModelForCausalLM.from_config(other).save_pretrained(tmp_path / "other")
    trainer(tmp_path / "other").save(tmp_path / "state")
    with pytest.raises(TrainerError, match="another model"):
        trainer(policy).load(tmp_path / "state")


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
