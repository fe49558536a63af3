"""The local trainer: its metrics of a batch, the batches it refuses, its steps and its thread."""

import copy
import gc
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from agl_slime.errors import ConfigError, TrainerError  # noqa: E402
from agl_slime.loop.trainer import Trainer  # noqa: E402
from agl_slime.train.local import LocalTrainerSettings, TrainBatch  # noqa: E402
from agl_slime.types import Sample  # noqa: E402
from tests.harness.trainer_policy import VOCABULARY, make_model, make_samples  # noqa: E402
from tests.harness.trainers import ONE_STEP, flat, gradient, recorded_gradients, trainer, weights  # noqa: E402

# -- metrics and the checks on a batch -------------------------------------------------------------------------------


def test_the_first_batch_agrees_with_the_engine_and_is_counted(policy: Path, samples: list[Sample]):
    ours = trainer(policy)
    assert isinstance(ours, Trainer)
    metrics = ours.train(samples, iteration=0)
    names = "loss log_ratio_clamped logprob_diff_max logprob_diff_mean first_ratio_dev_max grad_norm clip_fraction kl"
    names += " engine_kl entropy tokens samples rollouts steps lr seconds"
    assert set(metrics) == {f"train/{name}" for name in names.split()}
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["train/logprob_diff_max"] < 1e-5
    assert 0 < metrics["train/logprob_diff_mean"] <= metrics["train/logprob_diff_max"]
    assert metrics["train/first_ratio_dev_max"] < 1e-5
    assert metrics["train/tokens"] == sum(sum(sample.loss_mask or []) for sample in samples)
    assert (metrics["train/samples"], metrics["train/rollouts"], metrics["train/steps"]) == (12, 12, 4)
    assert 0 < metrics["train/entropy"] < math.log(VOCABULARY)


def test_it_tells_the_log_prob_and_the_advantage_of_each_trained_token(policy: Path, samples: list[Sample]):
    local = trainer(policy, n_minibatches=1)
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


def test_an_advantage_and_a_metric_by_path_are_of_the_batch(policy: Path, samples: list[Sample], tmp_path: Path):
    (file := tmp_path / "mine.py").write_text(
        "def double(rewards, groups):\n    return 2 * rewards\n\n"
        "def mean(*, advantages, **arrays):\n    assert {len(a) for a in arrays.values()} == {len(advantages)}\n"
        "    return {'mean': advantages.mean()} if set(arrays) == {*NAMES} else {}\n\n"
        "NAMES = 'log_probs', 'old_log_probs', 'entropy', 'rollouts'"
    )
    metrics = trainer(policy, advantage=f"{file}:double", metric=f"{file}:mean").train(samples, iteration=0)
    rewards = TrainBatch.from_samples(samples, rewards_normalization=False).token_rewards
    assert metrics["user/mean"] == pytest.approx(2 * rewards.mean())
    for flag in ("advantage", "metric"):
        with pytest.raises(ConfigError, match=f"--local.{flag} .* has no function absent"):
            trainer(policy, **{flag: f"{file}:absent"})


def test_the_log_prob_difference_shows_a_wrong_mask_or_temperature(policy: Path, tmp_path: Path):
    make_model(attention_dropout=0.5).save_pretrained(tmp_path)
    samples = make_samples(make_model(), response_lengths=(6, 20), temperature=0.7)
    for checkpoint, temperature, low, high in (
        (policy, 0.7, 0, 1e-5),
        (tmp_path, 0.7, 0, 1e-5),
        (policy, 1.0, 0.01, 9),
    ):
        metrics = trainer(checkpoint, temperature=temperature).train(samples, iteration=0)
        assert low <= metrics["train/logprob_diff_max"] < high
        assert low <= metrics["train/first_ratio_dev_max"] < high or temperature == 1.0
    for sample in samples:
        assert sample.loss_mask is not None
        sample.loss_mask = [*sample.loss_mask[1:], sample.loss_mask[0]]  # off by one
    assert trainer(policy, temperature=0.7).train(samples, iteration=0)["train/logprob_diff_max"] > 1.0


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
    with pytest.raises(TrainerError, match="no rollout_log_probs, which off_policy 'tis'"):
        trainer(policy, old_log_probs="recompute", off_policy="tis").train(bare, iteration=0)
    metrics = trainer(policy, old_log_probs="recompute").train(bare, iteration=0)
    assert "train/logprob_diff_max" not in metrics
    assert metrics["train/first_ratio_dev_max"] < 1e-5


def test_a_batch_that_cannot_be_trained_on_is_refused(policy: Path, samples: list[Sample]):
    removed, broken, bare, with_image = (copy.deepcopy(samples) for _ in range(4))
    for sample in removed:
        sample.remove_sample = True
    broken[2].tokens[0] = VOCABULARY
    bare[1].tokens = bare[1].tokens[-bare[1].response_length :]
    with_image[3].multimodal_train_inputs = {"pixels": 1}
    ours = trainer(policy)
    for batch, iteration, message in (
        (removed, 0, "none of the 12 samples"),
        (broken, 0, f"tokens of sample 2 .* {VOCABULARY}"),
        (bare, 0, "response_length of sample 1 is .* the prompt needs at least one"),
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


def test_rollouts_are_divided_again_by_iteration_epoch_and_seed(policy: Path, samples: list[Sample]):
    def first_minibatches(iteration: int, seed: int) -> list[torch.Tensor]:
        ours = trainer(policy, seed=seed, epochs=2, n_minibatches=2, lr=1e-30)
        with recorded_gradients(ours) as steps:
            ours.train(samples, iteration=iteration)
        return [steps[0], steps[2]]  # of the first epoch and of the second

    first, second = first_minibatches(0, 0), first_minibatches(0, 0)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    for different in (first[1], first_minibatches(1, 0)[0], first_minibatches(0, 1)[0]):
        assert not torch.equal(first[0], different)


def test_epochs_and_minibatches_with_trained_tokens_make_the_steps(policy: Path, samples: list[Sample]):
    ours = trainer(policy, epochs=2, n_minibatches=3, warmup_steps=9, lr=9e-4)
    metrics = ours.train(samples, iteration=0)
    assert metrics["train/steps"] == ours.steps == 6
    assert metrics["train/tokens"] == sum(sum(sample.loss_mask or []) for sample in samples)  # of one epoch
    rates = [metrics["train/lr"], *(ours.train(samples, iteration=i)["train/lr"] for i in (1, 2))]
    assert rates == pytest.approx([6e-4, 9e-4, 9e-4])  # it warms up and stays
    assert trainer(policy, n_minibatches=8).train(samples[:4], iteration=0)["train/steps"] == 4  # of four rollouts
    group = copy.deepcopy(samples[:4])
    for sample in group[1:]:
        sample.remove_sample = True
    metrics = trainer(policy, n_minibatches=4).train(group, iteration=0)
    assert (metrics["train/steps"], metrics["train/tokens"]) == (1, sum(group[0].loss_mask or []))
    assert gradient(policy, samples, grad_clip=0.05).norm().item() == pytest.approx(0.05, rel=1e-4)


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


# -- its thread -----------------------------------------------------------------------------------------------------


def test_steps_and_checkpoints_share_one_thread_for_all_callers(policy: Path, samples: list[Sample], tmp_path: Path):
    ours, threads = trainer(policy), set()
    ours.on_progress = lambda share: threads.add(threading.current_thread())
    ours.model.register_state_dict_pre_hook(lambda *_: threads.add(threading.current_thread()))
    calls = [lambda n=n: ours.train(samples, iteration=n) for n in range(3)]
    calls += [lambda: ours.save_weights(tmp_path / "weights"), lambda: ours.save(tmp_path / "state")]
    for call in [*calls, lambda: ours.load(tmp_path / "state")]:
        with ThreadPoolExecutor(1) as caller:
            caller.submit(call).result()
    assert [thread.name for thread in threads] == ["agl-slime-trainer"]


def test_calls_at_the_same_time_wait_for_one_another(policy: Path, samples: list[Sample], tmp_path: Path) -> None:
    """As where a run is cancelled in the middle of a step, and its checkpoint is written."""
    ours, training, go_on = trainer(policy), threading.Event(), threading.Event()

    def hold(share: float) -> None:
        training.set()
        assert go_on.wait(20)

    ours.on_progress = hold
    with ThreadPoolExecutor(2) as callers:
        trained = callers.submit(ours.train, samples, iteration=7)
        assert training.wait(20)
        saved = callers.submit(ours.save, tmp_path / "state")
        with pytest.raises(FutureTimeoutError):
            saved.result(0.2)
        go_on.set()
        trained.result(20)
        saved.result(20)
    resumed = trainer(policy)
    resumed.load(tmp_path / "state")
    assert (resumed.iteration, resumed.steps) == (7, ours.steps)


def test_the_thread_ends_with_its_trainer(policy: Path, samples: list[Sample]) -> None:
    old_threads = set(threading.enumerate())
    ours = trainer(policy)
    ours.train(samples, iteration=0)
    (thread,) = (thread for thread in set(threading.enumerate()) - old_threads if thread.name == "agl-slime-trainer")
    del ours
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
