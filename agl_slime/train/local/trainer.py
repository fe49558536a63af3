"""GRPO/PPO-clip in torch, for models that fit one device: the trainer of a laptop without slime."""

from __future__ import annotations

import copy
import math
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple
from weakref import finalize

import numpy as np

from agl_slime.errors import DiskFullError, TrainerError, missing_as_error

with missing_as_error('the local trainer needs torch: pip install "agl-slime[local]"'):
    import torch
    from torch import Tensor

from agl_slime.loop.trainer import TokenScores
from agl_slime.support.files import verify_checksums, whole_directory, write_checksums
from agl_slime.support.memory import return_freed_memory
from agl_slime.support.threads import ThreadPool
from agl_slime.train.local import lora
from agl_slime.train.local.batch import MicroBatch, TrainBatch, make_microbatches, split_minibatches, token_staleness
from agl_slime.train.local.functions import user_function, user_metrics
from agl_slime.train.local.hardware import bfloat16_wanted, in_own_thread, set_threads, torch_device
from agl_slime.train.local.loss import (
    Objective,
    Reference,
    keep_nucleus,
    policy_loss,
    sequence_means,
    teacher_advantages,
    token_entropy,
    token_log_probs,
    token_weights,
)
from agl_slime.train.local.model import (
    allow_packing,
    checkpoint_layers,
    hidden_at,
    load_model,
    logits_of,
    packs,
    save_model,
)
from agl_slime.train.local.settings import LocalTrainerSettings, WeightsDtype, default_lr
from agl_slime.types import Sample, flat_samples

LOGITS_CHUNK = 512  # sampled tokens per computation of logits over the whole vocabulary: bounds memory
_STATE_FILE = "trainer_state.pt"
_STATE_FORMAT = 1


class _Scores(NamedTuple):
    """A policy's scores of the tokens of a batch, ``[n_tokens]`` each; NaN for tokens that are not scored yet."""

    log_probs: Tensor
    entropy: Tensor


class LocalTrainer:
    """Clipped policy-gradient steps on slime's samples. Weights, optimizer and log-probs are float32. Any thread may
    call the methods; they run one after another in the trainer's thread: the C library keeps freed memory per thread,
    so steps in changing threads would need it several times."""

    def __init__(
        self,
        *,
        model_path: str | os.PathLike[str],
        settings: LocalTrainerSettings | None = None,
        temperature: float = 1.0,
        teacher_coef: float = 0.0,
        teacher_alone: bool = False,
        seed: int = 0,
        torch_threads: int | Literal["auto"] | None = None,
    ) -> None:
        """Load the start policy from the Hugging Face checkpoint in the directory ``model_path``.

        Args:
            temperature: the rollouts' sampling temperature: log-probs are of ``softmax(logits / temperature)``.
            teacher_coef: coefficient of the reverse KL to the teacher in the advantage (``teacher_advantages``); above
                0 the samples need ``teacher_log_probs``. With ``teacher_alone`` the rewards do not count.
            seed: seed of the order in which rollouts are divided among minibatches, and of new adapters.
            torch_threads: torch's CPU threads, for the whole process; ``None`` leaves them unchanged. ``"auto"`` is 1
                for small models, which are slower with more, else the number of cores.

        Raises ``ConfigError`` for an unusable checkpoint or device, ``MissingDependencyError`` without peft for
        LoRA.
        """
        self.settings = settings or LocalTrainerSettings()
        # a missing function is an error before the first rollout
        if self.settings.loss != "gspo":
            policy_loss(self.settings.loss)
        for flag in ("advantage", "metric"):
            if path := getattr(self.settings, flag):
                user_function(path, flag=f"--local.{flag}")
        self._temperature, self._seed = temperature, seed
        self._teacher_coef, self._teacher_alone = teacher_coef, teacher_alone
        self._torch_threads: int | Literal["auto"] | None = torch_threads
        self.thread = ThreadPool(name="agl-slime-trainer", max_running=1, lasting=True)
        finalize(self, self.thread.close)
        self._device = torch_device(self.settings.device)
        bfloat16 = bfloat16_wanted(self.settings.compute_dtype, self._device)
        self.computes_in: WeightsDtype = "bfloat16" if bfloat16 else "float32"
        """The dtype of the layers' computation."""
        self._computing = torch.autocast(self._device.type, dtype=torch.bfloat16) if bfloat16 else nullcontext()
        self._source = Path(model_path)
        self.model = load_model(self._source, device=self._device)
        set_threads(torch_threads, self.model)
        self.lr = self.settings.lr or default_lr(self.model.num_parameters(), lora=bool(self.settings.lora_rank))
        """The learning rate after the warm-up."""
        self._vocab_size = int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[arg-type, union-attr]
        allow_packing(self.model)
        self._start_model = None  # with LoRA: the model without its adapters
        if self.settings.kl_coef > 0:
            full = not self.settings.lora_rank
            self._start_model = copy.deepcopy(self.model).requires_grad_(False) if full else self.model
        if self.settings.lora_rank:
            lora.add_adapters(self.model, self.settings, seed=seed)
        if self.settings.gradient_checkpointing:
            checkpoint_layers(self.model)
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in self._trained if parameter.ndim >= 2]
        vectors = [parameter for parameter in self._trained if parameter.ndim < 2]
        decay = self.settings.weight_decay
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.lr,
            betas=self.settings.betas,
            fused=self._device.type in ("cpu", "cuda"),  # one pass over weights and moments
        )

        self.iteration = -1
        """The last trained iteration."""
        self.steps = 0
        """Optimizer steps taken so far."""
        self.scores: TokenScores | None = None
        """The policy's first scores of the tokens of the last batch."""
        self.reference: Reference | None = None
        """A KL term to log-probs that are known, in place of the start model's."""
        self.on_progress: Callable[[float], None] | None = None
        """Called in the trainer's thread after each microbatch with the completed share of ``train``."""
        # in ids: a forward pass counts 1 per id, with a backward pass 3
        self._done_work, self._planned_work = 0, 1

    # -- training -----------------------------------------------------------------------------------------------------

    @in_own_thread
    def train(self, batch: Sequence[Sample] | Sequence[Sequence[Sample]], *, iteration: int) -> dict[str, float]:
        """Take ``epochs * n_minibatches`` optimizer steps on ``batch``, samples that may be nested in groups.

        The order of the rollouts is drawn from ``(seed, iteration, epoch)``, so a repeated iteration divides them
        equally.

        Returns:
            Metrics named ``train/...`` (docs/report.md, docs/off-policy.md). ``tokens`` counts one epoch, ``grad_norm``
            is before clipping. ``entropy`` is of the policy at the first pass over the token: only ``old_log_probs`` of
            ``"recompute"`` has a pass over the batch before the steps. ``logprob_diff_...`` are of the first minibatch,
            with ``"recompute"`` of the whole batch.

        Raises:
            TrainerError: the batch cannot be trained on (nothing is changed), or the loss or the gradient of a
                minibatch is not finite (its step is skipped; the steps of earlier minibatches stay).
        """
        started = time.perf_counter()
        if iteration < 0:
            raise TrainerError(f"iteration is {iteration}; it must be at least 0.")
        checked, everything = self._prepare(batch)
        metrics = {"train/samples": float(checked.n_samples), "train/rollouts": float(checked.n_rollouts)}
        if self.settings.overlong_buffer:
            metrics["train/overlong_penalty"] = checked.overlong_penalty
        n_minibatches = min(self.settings.n_minibatches, checked.n_rollouts)
        engine = None if checked.token_log_probs is None else self._tensor(checked.token_log_probs)
        recompute = engine is None or self.settings.old_log_probs == "recompute"
        by_sequence = self.settings.loss == "gspo"
        passes, epochs = recompute + (self._start_model is not None), self.settings.epochs
        work = (len(micro.ids) * (passes + epochs * (by_sequence + self._cost(micro))) for micro in everything)
        self._done_work, self._planned_work = 0, sum(work)
        unscored = torch.full((2, checked.n_tokens), math.nan, device=self._device)
        first = self._score(self.model, everything, checked.n_tokens) if recompute else _Scores(*unscored)
        old = first.log_probs if recompute or engine is None else engine
        if self._teacher_coef:
            checked, metrics["train/teacher_kl"] = self._with_teacher(checked, old)
        objective = self._objective(checked, old, engine, everything, n_minibatches=n_minibatches)
        objective.staleness = self._tensor(token_staleness(list(flat_samples(batch)), checked))
        steps: list[tuple[float, float]] = []
        for epoch in range(epochs):
            rng = np.random.default_rng((self._seed, iteration, epoch))
            for samples in split_minibatches(checked, n_minibatches=n_minibatches, rng=rng):
                microbatches = self._microbatches(checked, samples)
                if not microbatches:  # all tokens are masked
                    continue
                if by_sequence:  # a ratio of all the rollout's tokens, before any of its gradients
                    log_ratios = self._score(self.model, microbatches, checked.n_tokens).log_probs - old
                    objective.sequence_log_ratios = sequence_means(log_ratios, self._tensor(checked.token_rollouts))
                place = f"minibatch {len(steps) + 1} of iteration {iteration}"
                fill = None if recompute or epoch else first  # the first pass over a token scores it
                steps.append(self._step(microbatches, objective.loss, fill, place))
                if len(steps) == 1:
                    metrics["train/first_ratio_dev_max"] = objective.ratio_dev_max
                    if engine is not None:
                        difference = (first.log_probs - engine).abs()
                        difference = difference[~difference.isnan()]
                        metrics["train/logprob_diff_max"] = float(difference.max())
                        metrics["train/logprob_diff_mean"] = float(difference.mean())
            if epoch == 0:
                metrics["train/tokens"] = float(objective.tokens)
        self.iteration = iteration
        ends = checked.token_offsets[1:-1]
        self.scores = TokenScores(
            log_probs=np.split(first.log_probs.cpu().numpy(), ends),
            advantages=np.split(checked.token_rewards.astype(np.float32), ends),
            entropy=np.split(first.entropy.cpu().numpy(), ends),
        )
        loss, norm = (math.fsum(values) / len(steps) for values in zip(*steps, strict=True))
        metrics |= objective.metrics() | {"train/loss": loss, "train/grad_norm": norm, "train/steps": float(len(steps))}
        metrics |= {"train/entropy": float(first.entropy.mean()), "train/lr": self._optimizer.param_groups[0]["lr"]}
        if self.settings.metric:
            scored = {"log_probs": first.log_probs, "old_log_probs": old, "entropy": first.entropy}
            arrays = {name: tensor.cpu().numpy() for name, tensor in scored.items()}
            arrays |= {"advantages": checked.token_rewards, "rollouts": checked.token_rollouts}
            metrics |= user_metrics(self.settings.metric, **arrays)
        return_freed_memory()
        return metrics | {"train/seconds": time.perf_counter() - started}

    @in_own_thread
    def imitate(self, samples: Sequence[Sample]) -> float:
        """Take one step of supervised learning on the tokens under the mask, whose rewards are 1; returns their
        cross-entropy in nats per token. Raises ``TrainerError`` as :meth:`train`."""
        batch, microbatches = self._prepare(samples)
        self._done_work, self._planned_work = 0, sum(len(micro.ids) * self._cost(micro) for micro in microbatches)
        place = f"step {self.steps + 1}"
        return self._step(microbatches, lambda _, log_probs: -log_probs.sum() / batch.n_tokens, None, place)[0]

    @in_own_thread
    def score(self, samples: Sequence[Sample] | Sequence[Sequence[Sample]]) -> list[np.ndarray]:
        """The log-probs of the tokens under the mask of each sample, float32, by the current weights at the sampling
        temperature. Raises ``TrainerError`` as :meth:`train`."""
        checked, microbatches = self._prepare(samples)
        self._done_work, self._planned_work = 0, sum(len(micro.ids) for micro in microbatches)
        scores = self._score(self.model, microbatches, checked.n_tokens)
        return np.split(scores.log_probs.cpu().numpy(), checked.token_offsets[1:-1])

    @in_own_thread
    def rollout_gradients(
        self, batch: Sequence[Sample] | Sequence[Sequence[Sample]], reduce: Callable[[list[Tensor]], Tensor]
    ) -> dict[int, tuple[Tensor, Tensor]]:
        """For each ``rollout_id`` two gradients at the current weights, as ``reduce`` makes each of the tensors of the
        trained weights: of the rollout's part of the loss of one step on the whole batch, so that the parts add up to
        the step's gradient, and of the sum of the rollout's log-probs. Nothing is trained. Raises ``TrainerError`` as
        :meth:`train`."""
        checked, everything = self._prepare(batch)
        engine = None if checked.token_log_probs is None else self._tensor(checked.token_log_probs)
        now = self._score(self.model, everything, checked.n_tokens).log_probs
        old = now if engine is None or self.settings.old_log_probs == "recompute" else engine
        if self._teacher_coef:
            checked, _ = self._with_teacher(checked, old)
        objective = self._objective(checked, old, engine, everything, n_minibatches=1)
        objective.sequence_log_ratios = sequence_means(now - old, self._tensor(checked.token_rollouts))
        gradients: dict[int, tuple[Tensor, Tensor]] = {}
        for number in np.unique(checked.rollout_ids):
            of_loss = self._microbatches(checked, np.flatnonzero(checked.rollout_ids == number))
            of_log_probs = [replace(micro, has_advantage=True) for micro in of_loss]
            gradients[int(number)] = (
                self._gradient(of_loss, objective.loss, reduce),
                self._gradient(of_log_probs, lambda _, log_probs: log_probs.sum(), reduce),
            )
        return gradients

    def _gradient(
        self,
        microbatches: list[MicroBatch],
        loss: Callable[[Tensor, Tensor], Tensor],
        reduce: Callable[[list[Tensor]], Tensor],
    ) -> Tensor:
        try:
            for micro in microbatches:
                self._loss(micro, loss, None, "a rollout")
            return reduce([torch.zeros_like(p) if p.grad is None else p.grad for p in self._trained])
        finally:
            self._optimizer.zero_grad(set_to_none=True)

    def _with_teacher(self, batch: TrainBatch, old: Tensor) -> tuple[TrainBatch, float]:
        """``batch`` with the teacher in its advantages, and the mean reverse KL."""
        teacher = batch.token_teacher_log_probs
        if teacher is None:
            raise TrainerError("the batch has no teacher_log_probs, which teacher_coef needs; give --teacher-url.")
        rewards = self._tensor(batch.token_rewards.astype(np.float32))
        base = torch.zeros_like(rewards) if self._teacher_alone else rewards
        advantages, kl = teacher_advantages(base, old, self._tensor(teacher), coef=self._teacher_coef)
        return replace(batch, token_rewards=advantages.cpu().numpy().astype(np.float64)), float(kl.mean())

    def _objective(
        self, batch: TrainBatch, old: Tensor, engine: Tensor | None, everything: list[MicroBatch], *, n_minibatches: int
    ) -> Objective:
        """The loss of ``batch``, whose tokens have the log-probs ``old`` in the denominator of the ratio."""
        objective = Objective(
            settings=self.settings,
            old_log_probs=old,
            engine_log_probs=engine,
            advantages=self._tensor(batch.token_rewards.astype(np.float32)),
            rollouts=self._tensor(batch.token_rollouts),
            weights=token_weights(
                self.settings.aggregation,
                rollout_mask_sums=self._tensor(batch.token_rollout_mask_sums),
                n_tokens=batch.n_tokens,
                n_rollouts=batch.n_rollouts,
                n_minibatches=n_minibatches,
                max_tokens=self.settings.max_response,
            ),
        )
        if (reference := self.reference) is not None:
            objective.reference = replace(reference, log_probs=reference.log_probs.to(self._device))
        if self._start_model is not None:
            with lora.without_adapters(self.model) if self.settings.lora_rank else nullcontext():
                start = self._score(self._start_model, everything, batch.n_tokens).log_probs
            objective.reference = Reference(log_probs=start, coef=self.settings.kl_coef)
        return objective

    def _step(
        self,
        microbatches: list[MicroBatch],
        loss_of: Callable[[Tensor, Tensor], Tensor],
        scores: _Scores | None,
        place: str,
    ) -> tuple[float, float]:
        """One optimizer step; returns the loss and the norm of the gradient, and writes the tokens' scores to
        ``scores``."""
        total = 0.0
        try:
            for micro in microbatches:
                total += self._loss(micro, loss_of, scores, place)
                self._progressed(len(micro.ids) * self._cost(micro))
            if not any(map(self._has_gradient, microbatches)):
                for parameter in self._trained:  # AdamW skips its momentum without a gradient
                    parameter.grad = torch.zeros_like(parameter)
            norm = float(torch.nn.utils.clip_grad_norm_(self._trained, self.settings.grad_clip))
            if not math.isfinite(norm):
                raise TrainerError(f"the gradient norm of {place} is {norm}; no step was taken on it. Lower lr.")
            lr = self.lr * min(1.0, (self.steps + 1) / max(1, self.settings.warmup_steps))
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
            self.steps += 1
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        return total, norm

    def _loss(
        self, micro: MicroBatch, loss_of: Callable[[Tensor, Tensor], Tensor], scores: _Scores | None, place: str
    ) -> float:
        """The loss of ``micro``, by ``loss_of`` (indices in the batch, log-probs); its gradient is added to the
        weights' gradients.

        The loss is a sum over tokens. Chunks of tokens go through output layer and loss and back immediately, so their
        logits are computed once and freed; then all go back through the layers together.
        """
        total, has_gradient = 0.0, self._has_gradient(micro)
        with torch.set_grad_enabled(has_gradient):
            with self._computing:
                hidden = hidden_at(self.model, micro)
            cut = hidden.detach().requires_grad_(has_gradient)
            for index, log_probs, entropy in self._pieces(self.model, micro, cut):
                loss = loss_of(index, log_probs)
                if not math.isfinite(value := loss.item()):
                    raise TrainerError(f"the loss of {place} is {value}; no step was taken on it. Lower lr.")
                total += value
                if has_gradient:
                    loss.backward()
                if scores is not None:
                    scores.log_probs[index] = log_probs.detach().to(scores.log_probs.dtype)
                    scores.entropy[index] = entropy.to(scores.entropy.dtype)
            if has_gradient:
                hidden.backward(cut.grad)
        return total

    @torch.no_grad()
    def _score(self, model: Any, microbatches: list[MicroBatch], n_tokens: int) -> _Scores:
        """Log-prob and entropy of every token under the mask, in the order of the batch."""
        scores = _Scores(*torch.empty(2, n_tokens, device=self._device))
        for micro in microbatches:
            with self._computing:
                hidden = hidden_at(model, micro)
            for index, log_probs, entropy in self._pieces(model, micro, hidden):
                scores.log_probs[index] = log_probs.to(scores.log_probs.dtype)
                scores.entropy[index] = entropy.to(scores.entropy.dtype)
            self._progressed(len(micro.ids))
        return scores

    def _pieces(self, model: Any, micro: MicroBatch, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Chunks of the tokens under the mask: their indices in the batch, log-probs, and entropies (without gradient),
        from the hidden states ``hidden`` ``[N, hidden]``."""
        size = LOGITS_CHUNK
        chunks = (
            hidden.split(size),
            self._tensor(micro.targets).split(size),
            self._tensor(micro.token_index).split(size),
        )
        for number, (states, targets, index) in enumerate(zip(*chunks, strict=True)):
            logits = logits_of(model, states.to(model.dtype))  # bfloat16 would round by hundredths of a nat
            if micro.nucleus is not None:
                nucleus = micro.nucleus.select(np.arange(number * size, number * size + len(targets)))
                candidates = (self._tensor(array.astype(np.int64)) for array in (nucleus.ids, np.diff(nucleus.offsets)))
                logits = keep_nucleus(logits, targets, *candidates)
            log_probs = token_log_probs(logits, targets, temperature=self._temperature)
            with torch.no_grad():
                entropy = token_entropy(logits, temperature=self._temperature)
            del logits  # else they stay in memory until the next chunk's exist
            yield index, log_probs, entropy

    def _has_gradient(self, micro: MicroBatch) -> bool:
        """Without an advantage and a KL term the gradient is 0, and there is no backward pass."""
        return bool(micro.has_advantage or self.settings.kl_coef or self.reference or self._teacher_coef)

    def _cost(self, micro: MicroBatch) -> int:
        """Cost in forward passes; a backward pass adds two."""
        return 3 if self._has_gradient(micro) else 1

    def _progressed(self, ids: int) -> None:
        self._done_work += ids
        if self.on_progress is not None:
            self.on_progress(min(1.0, self._done_work / self._planned_work))

    def _microbatches(self, batch: TrainBatch, samples: Sequence[int] | np.ndarray) -> list[MicroBatch]:
        size = self.settings.max_tokens_per_microbatch
        return list(make_microbatches(batch, samples, max_tokens=size, sharing=packs(self.model)))

    def _prepare(self, batch: Sequence[Sample] | Sequence[Sequence[Sample]]) -> tuple[TrainBatch, list[MicroBatch]]:
        """``batch``, checked, and all of it in microbatches."""
        set_threads(self._torch_threads, self.model)
        checked = TrainBatch.from_samples(
            batch,
            rewards=self.settings.rewards,
            credit=self.settings.credit,
            rewards_normalization=self.settings.rewards_normalization,
            std_normalization=self.settings.std_normalization,
            advantage=self.settings.advantage,
            max_response=self.settings.max_response,
            overlong_buffer=self.settings.overlong_buffer,
        )
        if checked.n_tokens == 0:
            raise TrainerError(f"none of the {checked.n_samples} samples has a token under its loss mask to train on.")
        for i, ids in enumerate(checked.tokens):
            if ids.max() >= self._vocab_size:
                sizes = f"{ids.max()}, but the model has {self._vocab_size}"
                raise TrainerError(f"tokens of sample {i} contain the id {sizes}; was it sampled from this model?")
        if checked.token_log_probs is None and self.settings.old_log_probs == "engine":
            raise TrainerError("the batch has no rollout_log_probs; set old_log_probs='recompute' to train without.")
        if checked.token_log_probs is None and self.settings.off_policy != "none":
            need = f"the batch has no rollout_log_probs, which off_policy {self.settings.off_policy!r} needs"
            raise TrainerError(f"{need}; set it to 'none' to train without.")
        return checked, self._microbatches(checked, range(checked.n_samples))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @in_own_thread
    def save_weights(self, directory: str | os.PathLike[str], *, dtype: WeightsDtype = "float32") -> None:
        """Write the weights (adapters merged into them) as a Hugging Face checkpoint, with the config and tokenizer
        files of ``model_path``. They are rounded to ``dtype``; an engine in bfloat16 would round them itself. The
        directory appears, or is replaced, as a whole or not at all. Raises ``TrainerError`` when it cannot be
        written."""
        self._write(directory, state=None, dtype=dtype)

    @in_own_thread
    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write and sync the weights (as :meth:`save_weights`), the state of the optimizer, the counters, and checksums
        of all."""
        state = {"format": _STATE_FORMAT, "optimizer": self._optimizer.state_dict()["state"]}
        if self.settings.lora_rank:
            adapters = {name: tensor.detach() for name, tensor in lora.adapter_weights(self.model).items()}
            state |= {"adapters": adapters, "base": lora.base_checksum(self.model)}
        counters = {"iteration": self.iteration, "steps": self.steps, "seed": self._seed}
        self._write(directory, state=state | counters)

    def _write(
        self, directory: str | os.PathLike[str], *, state: dict[str, Any] | None, dtype: WeightsDtype = "float32"
    ) -> None:
        try:
            with whole_directory(directory, durable=state is not None) as fresh:
                merged = lora.merged_weights(self.model) if self.settings.lora_rank else None
                save_model(self.model, fresh, source=self._source, weights=merged, dtype=getattr(torch, dtype))
                if state is not None:
                    if merged is not None:
                        lora.save_adapter(self.model, fresh / "adapter", base=self._source)
                    with (fresh / _STATE_FILE).open("wb") as file:  # given a path, torch hides the cause of an error
                        torch.save(state, file)
                    write_checksums(fresh)
        except DiskFullError:  # which says so
            raise
        except OSError as error:
            raise TrainerError(f"{directory} cannot be written: {error}") from error

    @in_own_thread
    def load(self, directory: str | os.PathLike[str]) -> None:
        """Resume exactly from :meth:`save`: weights (or adapters, on the same weights), optimizer, counters and seed.
        This trainer keeps its settings, learning rate included, and its start policy of the KL term.

        Raises:
            TrainerError: ``directory`` is not from ``save``, or is of another model. Nothing is changed then.
        """
        path = Path(directory) / _STATE_FILE
        try:
            verify_checksums(Path(directory))
            state = torch.load(path, map_location=self._device, weights_only=True)
            saved: dict[str, Tensor] = {}
            if not (with_adapters := self.settings.lora_rank > 0):
                saved = load_model(Path(directory), device=self._device).state_dict()
        except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
            raise TrainerError(f"the trainer state in {directory} cannot be read: {error}") from error
        if not isinstance(state, dict) or state.get("format") != _STATE_FORMAT:
            raise TrainerError(f"{path} is not a state of format {_STATE_FORMAT}; another version wrote it.")
        if with_adapters != ("adapters" in state):
            which, fix = ("with", "set the same") if not with_adapters else ("without", "leave it out")
            raise TrainerError(f"the state in {directory} was trained {which} lora_rank; {fix}.")
        if with_adapters:
            current, saved = lora.adapter_weights(self.model), state["adapters"]
            if state["base"] != lora.base_checksum(self.model):
                raise TrainerError(f"the adapters in {directory} belong to other weights than {self._source} has.")
        else:
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
