"""GRPO/PPO-clip on torch, for models that fit one device; what a laptop trains with where slime is not installed."""

from __future__ import annotations

import copy
import math
import os
import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agl_slime.errors import ConfigError, MissingDependencyError, TrainerError

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise MissingDependencyError('the local trainer needs torch: pip install "agl-slime[local]"') from error

from agl_slime.support.files import whole_directory
from agl_slime.trainers.base import TokenScores
from agl_slime.trainers.local.batch import MicroBatch, TrainBatch, make_microbatches, split_minibatches
from agl_slime.trainers.local.loss import Objective, token_entropy, token_log_probs, token_weights
from agl_slime.trainers.local.model import load_model, logits_at, save_model
from agl_slime.trainers.local.settings import LocalTrainerSettings
from agl_slime.trainers.local.staleness import token_lags
from agl_slime.types import Sample, flat_samples

_STATE_FILE = "trainer_state.pt"
_STATE_FORMAT = 1


class LocalTrainer:
    """Clipped policy-gradient steps on slime's samples. Weights, optimizer and log-probs are float32. Methods are
    synchronous and must not run at the same time as one another."""

    def __init__(self, *, model_path: str | os.PathLike[str], settings: LocalTrainerSettings | None = None) -> None:
        """Load the start policy from the Hugging Face checkpoint in the directory ``model_path``; raises
        ``ConfigError`` when there is no usable one, or no such device."""
        self.settings = settings or LocalTrainerSettings()
        self._set_threads()
        self._device = _device(self.settings.device)
        self._source = Path(model_path)
        self.model = load_model(self._source, device=self._device)
        self._start_model = copy.deepcopy(self.model).requires_grad_(False) if self.settings.kl_coef > 0 else None
        self._vocab_size = int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[arg-type, union-attr]
        matrices = [parameter for parameter in self.model.parameters() if parameter.ndim >= 2]
        others = [parameter for parameter in self.model.parameters() if parameter.ndim < 2]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": self.settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=self.settings.lr,
            betas=self.settings.betas,
        )
        self._seed = self.settings.seed
        self.iteration = -1
        """The iteration trained last."""
        self.steps = 0
        """Optimizer steps taken so far."""
        self.scores: TokenScores | None = None
        """What the policy made of the tokens of the last batch, before any step on it."""

    # -- training -----------------------------------------------------------------------------------------------------

    def train(self, batch: Sequence[Sample] | Sequence[Sequence[Sample]], *, iteration: int) -> dict[str, float]:
        """Take ``epochs * n_minibatches`` optimizer steps on ``batch``, samples that may be nested in groups.

        The order of the rollouts is drawn from ``(seed, iteration, epoch)``, so an iteration that is run again divides
        them alike.

        Returns:
            Of the batch before any step: ``train/samples``, ``train/rollouts``, ``train/entropy`` (nats per token) and
            ``train/logprob_diff_max`` and ``_mean`` (trainer and engine, per token; where the engine's are given). Of
            the steps: ``train/tokens`` (under the mask, of one epoch), ``train/loss`` and ``train/grad_norm`` (before
            clipping), means over steps; ``train/first_ratio_dev_max`` (largest ``|ratio - 1|`` of the first minibatch
            before its step); ``train/clip_fraction``, ``train/kl`` (from the old policy, k3) and with ``kl_coef``
            ``train/kl_start`` (to the start policy), means over tokens; where the engine's log-probs are given
            ``train/engine_kl`` (of the trainer's policy before the first step, or with ``old_log_probs`` of "engine" of
            the one that is trained, from the engine's; k3), with ``off_policy`` ``train/off_policy_weight`` and
            ``train/off_policy_cut`` (share of tokens whose weight was truncated or set to 0), and each of these by the
            age of the weights that sampled (see ``Objective.metrics``); ``train/steps``, ``train/lr`` and
            ``train/seconds``.

        Raises:
            TrainerError: the batch cannot be trained on (nothing has changed then), or the loss or the gradient of a
                minibatch is not finite (its step is not taken; the steps of earlier minibatches stay).
        """
        started = time.perf_counter()
        self._set_threads()
        if iteration < 0:
            raise TrainerError(f"iteration is {iteration}; it must be at least 0.")
        checked = self._check(batch)
        n_minibatches = min(self.settings.n_minibatches, checked.n_rollouts)
        objective, metrics = self._objective(checked, n_minibatches=n_minibatches)
        objective.lags = self._tensor(token_lags(list(flat_samples(batch)), checked))
        steps: list[tuple[float, float]] = []
        for epoch in range(self.settings.epochs):
            rng = np.random.default_rng((self._seed, iteration, epoch))
            for samples in split_minibatches(checked, n_minibatches=n_minibatches, rng=rng):
                microbatches = self._microbatches(checked, samples)
                if not microbatches:  # all its tokens are masked out
                    continue
                place = f"minibatch {len(steps) + 1} of iteration {iteration}"
                steps.append(self._step(microbatches, objective, place=place))
                if len(steps) == 1:
                    metrics["train/first_ratio_dev_max"] = objective.ratio_dev_max
            if epoch == 0:
                metrics["train/tokens"] = float(objective.tokens)
        self.iteration = iteration
        loss, norm = (math.fsum(values) / len(steps) for values in zip(*steps, strict=True))
        metrics |= objective.metrics() | {"train/loss": loss, "train/grad_norm": norm, "train/steps": float(len(steps))}
        lr = self._optimizer.param_groups[0]["lr"]
        return metrics | {"train/lr": lr, "train/seconds": time.perf_counter() - started}

    def _objective(self, batch: TrainBatch, *, n_minibatches: int) -> tuple[Objective, dict[str, float]]:
        """The loss of ``batch``, and the metrics of the policy on it as it is before any step."""
        everything = self._microbatches(batch, range(batch.n_samples))
        log_probs, entropy = self._score(self.model, everything, batch.n_tokens)
        metrics = {
            "train/samples": float(batch.n_samples),
            "train/rollouts": float(batch.n_rollouts),
            "train/entropy": float(entropy.mean()),
        }
        ends = batch.token_offsets[1:-1]
        self.scores = TokenScores(
            log_probs=np.split(log_probs.cpu().numpy(), ends),
            advantages=np.split(batch.token_rewards.astype(np.float32), ends),
        )
        old, engine = log_probs, None
        if batch.token_log_probs is not None:
            engine = self._tensor(batch.token_log_probs)
            difference = (log_probs - engine).abs()
            metrics["train/logprob_diff_max"] = float(difference.max())
            metrics["train/logprob_diff_mean"] = float(difference.mean())
            old = engine if self.settings.old_log_probs == "engine" else log_probs
        objective = Objective(
            settings=self.settings,
            old_log_probs=old,
            engine_log_probs=engine,
            advantages=self._tensor(batch.token_rewards.astype(np.float32)),
            weights=token_weights(
                self.settings.aggregation,
                rollout_mask_sums=self._tensor(batch.token_rollout_mask_sums),
                n_tokens=batch.n_tokens,
                n_rollouts=batch.n_rollouts,
                n_minibatches=n_minibatches,
            ),
        )
        if self._start_model is not None:
            objective.start_log_probs, _ = self._score(self._start_model, everything, batch.n_tokens)
        return objective, metrics

    def _step(self, microbatches: list[MicroBatch], objective: Objective, *, place: str) -> tuple[float, float]:
        """One optimizer step; returns the loss and the norm of the gradient."""
        total = 0.0
        try:
            for micro in microbatches:
                _, log_probs = self._log_probs(self.model, micro)
                loss = objective.loss(self._tensor(micro.token_index), log_probs)
                if not math.isfinite(value := loss.item()):
                    raise TrainerError(f"the loss of {place} is {value}; no step was taken on it. Lower lr.")
                loss.backward()
                total += value
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip))
            if not math.isfinite(norm):
                raise TrainerError(f"the gradient norm of {place} is {norm}; no step was taken on it. Lower lr.")
            lr = self.settings.lr * min(1.0, (self.steps + 1) / max(1, self.settings.warmup_steps))
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self.steps += 1
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        return total, norm

    @torch.no_grad()
    def _score(self, model: Any, microbatches: list[MicroBatch], n_tokens: int) -> tuple[Tensor, Tensor]:
        """Log-prob and entropy of every token under the mask, ``[n_tokens]`` each, in the order of the batch."""
        log_probs, entropy = (torch.empty(n_tokens, device=self._device) for _ in range(2))
        for micro in microbatches:
            logits, own = self._log_probs(model, micro)
            index = self._tensor(micro.token_index)
            log_probs[index] = own.to(log_probs.dtype)
            entropy[index] = token_entropy(logits, temperature=self.settings.temperature).to(entropy.dtype)
        return log_probs, entropy

    def _log_probs(self, model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Of the tokens under the mask: the logits they were sampled from, ``[N, vocabulary]``, and their log-probs."""
        rows, columns = self._tensor(micro.rows), self._tensor(micro.columns)
        logits = logits_at(model, self._tensor(micro.input_ids), rows=rows, columns=columns)
        return logits, token_log_probs(logits, self._tensor(micro.targets), temperature=self.settings.temperature)

    def _microbatches(self, batch: TrainBatch, samples: Sequence[int] | np.ndarray) -> list[MicroBatch]:
        return list(make_microbatches(batch, samples, max_tokens=self.settings.max_tokens_per_microbatch))

    def _check(self, batch: Sequence[Sample] | Sequence[Sequence[Sample]]) -> TrainBatch:
        checked = TrainBatch.from_samples(
            batch,
            reward_key=self.settings.reward_key,
            rewards_normalization=self.settings.rewards_normalization,
            std_normalization=self.settings.std_normalization,
        )
        if checked.n_tokens == 0:
            raise TrainerError(f"none of the {checked.n_samples} samples has a token under its loss mask to train on.")
        for i, ids in enumerate(checked.tokens):
            if ids.max() >= self._vocab_size:
                found = f"{ids.max()}, but the model has {self._vocab_size}"
                raise TrainerError(f"tokens of sample {i} hold the id {found}; was it sampled from this model?")
        if checked.token_log_probs is None and self.settings.old_log_probs == "engine":
            raise TrainerError("the batch has no rollout_log_probs; set old_log_probs='recompute' to do without.")
        if checked.token_log_probs is None and self.settings.off_policy != "none":
            found = f"the batch has no rollout_log_probs, which off_policy {self.settings.off_policy!r} compares with"
            raise TrainerError(f"{found}; set it to 'none' to do without.")
        return checked

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_weights(self, directory: str | os.PathLike[str]) -> None:
        """Write the weights (float32) as a Hugging Face checkpoint, with the config and tokenizer files of
        ``model_path``. The directory appears, or is replaced, as a whole or not at all; raises ``TrainerError`` when it
        cannot be written."""
        self._write(directory, state=None)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the weights as :meth:`save_weights` does, and the state of the optimizer and the counters with them,
        through to the disk."""
        counters = {"iteration": self.iteration, "steps": self.steps, "seed": self._seed}
        optimizer = self._optimizer.state_dict()["state"]
        self._write(directory, state={"format": _STATE_FORMAT, "optimizer": optimizer, **counters})

    def _write(self, directory: str | os.PathLike[str], *, state: dict[str, Any] | None) -> None:
        try:
            with whole_directory(directory, durable=state is not None) as fresh:
                save_model(self.model, fresh, source=self._source)
                if state is not None:
                    torch.save(state, fresh / _STATE_FILE)
        except OSError as error:
            raise TrainerError(f"{directory} cannot be written: {error}") from error

    def load(self, directory: str | os.PathLike[str]) -> None:
        """Go on exactly where :meth:`save` was called: weights, optimizer, counters and seed. The settings, learning
        rate included, stay those of this trainer, and so does the start policy of the KL term.

        Raises:
            TrainerError: ``directory`` does not hold what ``save`` writes, or it is of another model. Nothing has
                changed then.
        """
        path = Path(directory) / _STATE_FILE
        if not path.is_file():
            raise TrainerError(f"{path} does not exist; give a directory that LocalTrainer.save wrote.")
        try:
            state = torch.load(path, map_location=self._device, weights_only=True)
            saved = load_model(Path(directory), device=self._device).state_dict()
        except (ConfigError, OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
            raise TrainerError(f"the trainer state in {directory} cannot be read: {error}") from error
        if not isinstance(state, dict) or state.get("format") != _STATE_FORMAT:
            raise TrainerError(f"{path} is not a state of format {_STATE_FORMAT}; another version has written it.")
        current = self.model.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in current.items()}
        if shapes != {name: tuple(tensor.shape) for name, tensor in saved.items()}:
            raise TrainerError(f"the weights in {directory} are of another model than the one in {self._source}.")
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state["optimizer"], "param_groups": groups})
        with torch.no_grad():
            for name, tensor in current.items():
                tensor.copy_(saved[name])
        self.iteration, self.steps, self._seed = state["iteration"], state["steps"], state["seed"]

    # -- small things -------------------------------------------------------------------------------------------------

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    def _set_threads(self) -> None:
        if self.settings.torch_threads is not None:
            torch.set_num_threads(self.settings.torch_threads)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device is {name!r}, which torch cannot use here ({reason}); 'cpu' always works.") from error
    return device
