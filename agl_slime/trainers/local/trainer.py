"""GRPO/PPO-clip on torch, for models that fit one device; what a laptop trains with where slime is not installed."""

from __future__ import annotations

import copy
import math
import os
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple
from weakref import finalize

import numpy as np

from agl_slime.errors import MissingDependencyError, TrainerError

try:
    import torch
    from torch import Tensor
except ImportError as error:
    raise MissingDependencyError('the local trainer needs torch: pip install "agl-slime[local]"') from error

from agl_slime.support.files import verify_checksums, whole_directory, write_checksums
from agl_slime.support.memory import return_freed_memory
from agl_slime.support.threads import ThreadPool
from agl_slime.trainers.base import TokenScores
from agl_slime.trainers.local import lora
from agl_slime.trainers.local.batch import MicroBatch, TrainBatch, make_microbatches, split_minibatches, token_staleness
from agl_slime.trainers.local.hardware import bfloat16_wanted, in_own_thread, set_threads, torch_device
from agl_slime.trainers.local.loss import Objective, keep_nucleus, token_entropy, token_log_probs, token_weights
from agl_slime.trainers.local.model import (
    allow_packing,
    checkpoint_layers,
    hidden_at,
    load_model,
    logits_of,
    packs,
    save_model,
)
from agl_slime.trainers.local.settings import LocalTrainerSettings, WeightsDtype
from agl_slime.types import Sample, flat_samples

LOGITS_CHUNK = 512  # sampled tokens whose logits, over the whole vocabulary, are in memory at once
_STATE_FILE = "trainer_state.pt"
_STATE_FORMAT = 1


class _Seen(NamedTuple):
    """The tokens of a batch as the policy saw them first, ``[n_tokens]`` each; NaN where it has not yet."""

    log_probs: Tensor
    entropy: Tensor


class LocalTrainer:
    """Clipped policy-gradient steps on slime's samples. Weights, optimizer and log-probs are float32. Any thread may
    call the methods; they run in one of the trainer's own, one after another: the C library keeps the freed memory of
    each thread for that thread, so that steps in ever other threads would need it several times."""

    def __init__(
        self,
        *,
        model_path: str | os.PathLike[str],
        settings: LocalTrainerSettings | None = None,
        temperature: float = 1.0,
        seed: int = 0,
        torch_threads: int | Literal["auto"] | None = None,
    ) -> None:
        """Load the start policy from the Hugging Face checkpoint in the directory ``model_path``.

        Args:
            temperature: the rollouts' sampling temperature: log-probs are of ``softmax(logits / temperature)``.
            seed: seed of the order in which rollouts are divided among minibatches, and of new adapters.
            torch_threads: torch's CPU threads, for the whole process; ``None`` leaves them alone. ``"auto"`` is 1 for
                small models, which are slower with more, else the number of cores.

        Raises ``ConfigError`` when there is no usable checkpoint or no such device, ``MissingDependencyError`` without
        peft for LoRA.
        """
        self.settings = settings or LocalTrainerSettings()
        self._temperature, self._seed = temperature, seed
        self._torch_threads: int | Literal["auto"] | None = torch_threads
        self.thread = ThreadPool(name="agl-slime-trainer", max_running=1, lasting=True)
        finalize(self, self.thread.close)
        self._device = torch_device(self.settings.device)
        bfloat16 = bfloat16_wanted(self.settings.compute_dtype, self._device)
        self._computing = torch.autocast(self._device.type, dtype=torch.bfloat16) if bfloat16 else nullcontext()
        self._source = Path(model_path)
        self.model = load_model(self._source, device=self._device)
        self._set_threads()
        self._vocab_size = int(self.model.get_input_embeddings().weight.shape[0])  # type: ignore[arg-type, union-attr]
        allow_packing(self.model)
        self._start_model = None  # with LoRA it is the model without its adapters
        if self.settings.kl_coef > 0:
            full = not self.settings.lora_rank
            self._start_model = copy.deepcopy(self.model).requires_grad_(False) if full else self.model
        if self.settings.lora_rank:
            lora.add_adapters(self.model, self.settings, seed=seed)
        if self.settings.gradient_checkpointing:
            checkpoint_layers(self.model)
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in self._trained if parameter.ndim >= 2]
        others = [parameter for parameter in self._trained if parameter.ndim < 2]
        self._optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": self.settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=self.settings.lr,
            betas=self.settings.betas,
            fused=self._device.type in ("cpu", "cuda"),  # one pass over weights and moments
        )

        self.iteration = -1
        """The iteration trained last."""
        self.steps = 0
        """Optimizer steps taken so far."""
        self.scores: TokenScores | None = None
        """What the policy made of the tokens of the last batch, each as it first saw it."""
        self.on_progress: Callable[[float], None] | None = None
        """Told, in the thread that trains, which share of a ``train`` is done, after each microbatch."""
        # ids, each counted once for a forward pass and three times with a backward one
        self._done, self._planned = 0, 1

    # -- training -----------------------------------------------------------------------------------------------------

    @in_own_thread
    def train(self, batch: Sequence[Sample] | Sequence[Sequence[Sample]], *, iteration: int) -> dict[str, float]:
        """Take ``epochs * n_minibatches`` optimizer steps on ``batch``, samples that may be nested in groups.

        The order of the rollouts is drawn from ``(seed, iteration, epoch)``, so an iteration that is run again divides
        them alike.

        Returns:
            Metrics named ``train/...`` (docs/report.md, docs/off-policy.md). ``tokens`` are those of one epoch, and
            ``grad_norm`` is before clipping; ``entropy`` is of the policy that first sees the token: there is no pass
            over the batch before the steps but for ``old_log_probs`` of ``"recompute"``. ``logprob_diff_...`` are of
            the first minibatch, with ``"recompute"`` of the whole batch.

        Raises:
            TrainerError: the batch cannot be trained on (nothing has changed then), or the loss or the gradient of a
                minibatch is not finite (its step is not taken; the steps of earlier minibatches stay).
        """
        started = time.perf_counter()
        self._set_threads()
        if iteration < 0:
            raise TrainerError(f"iteration is {iteration}; it must be at least 0.")
        checked = self._check(batch)
        metrics = {"train/samples": float(checked.n_samples), "train/rollouts": float(checked.n_rollouts)}
        n_minibatches = min(self.settings.n_minibatches, checked.n_rollouts)
        engine = None if checked.token_log_probs is None else self._tensor(checked.token_log_probs)
        recompute = engine is None or self.settings.old_log_probs == "recompute"
        everything = self._microbatches(checked, range(checked.n_samples))
        passes = recompute + (self._start_model is not None)
        work = (len(micro.ids) * (passes + self.settings.epochs * self._cost(micro)) for micro in everything)
        self._done, self._planned = 0, sum(work)
        unseen = torch.full((checked.n_tokens,), math.nan, device=self._device)
        seen = self._score(self.model, everything, checked.n_tokens) if recompute else _Seen(unseen, unseen.clone())
        old = seen.log_probs if recompute or engine is None else engine
        objective = self._objective(checked, old, engine, everything, n_minibatches=n_minibatches)
        objective.staleness = self._tensor(token_staleness(list(flat_samples(batch)), checked))
        steps: list[tuple[float, float]] = []
        for epoch in range(self.settings.epochs):
            rng = np.random.default_rng((self._seed, iteration, epoch))
            for samples in split_minibatches(checked, n_minibatches=n_minibatches, rng=rng):
                microbatches = self._microbatches(checked, samples)
                if not microbatches:  # all its tokens are masked out
                    continue
                place = f"minibatch {len(steps) + 1} of iteration {iteration}"
                steps.append(self._step(microbatches, objective, seen if not (recompute or epoch) else None, place))
                if len(steps) == 1:
                    metrics["train/first_ratio_dev_max"] = objective.ratio_dev_max
                    if engine is not None:
                        difference = (seen.log_probs - engine).abs()
                        difference = difference[~difference.isnan()]
                        metrics["train/logprob_diff_max"] = float(difference.max())
                        metrics["train/logprob_diff_mean"] = float(difference.mean())
            if epoch == 0:
                metrics["train/tokens"] = float(objective.tokens)
        self.iteration = iteration
        ends = checked.token_offsets[1:-1]
        self.scores = TokenScores(
            log_probs=np.split(seen.log_probs.cpu().numpy(), ends),
            advantages=np.split(checked.token_rewards.astype(np.float32), ends),
        )
        loss, norm = (math.fsum(values) / len(steps) for values in zip(*steps, strict=True))
        metrics |= objective.metrics() | {"train/loss": loss, "train/grad_norm": norm, "train/steps": float(len(steps))}
        metrics |= {"train/entropy": float(seen.entropy.mean()), "train/lr": self._optimizer.param_groups[0]["lr"]}
        return_freed_memory()
        return metrics | {"train/seconds": time.perf_counter() - started}

    def _objective(
        self, batch: TrainBatch, old: Tensor, engine: Tensor | None, everything: list[MicroBatch], *, n_minibatches: int
    ) -> Objective:
        """The loss of ``batch``, whose tokens have the log-probs ``old`` in the denominator of the ratio."""
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
            with lora.without_adapters(self.model) if self.settings.lora_rank else nullcontext():
                objective.start_log_probs = self._score(self._start_model, everything, batch.n_tokens).log_probs
        return objective

    def _step(
        self, microbatches: list[MicroBatch], objective: Objective, seen: _Seen | None, place: str
    ) -> tuple[float, float]:
        """One optimizer step; returns the loss and the norm of the gradient. What it finds of the tokens goes into
        ``seen``."""
        total = 0.0
        try:
            for micro in microbatches:
                total += self._loss(micro, objective, seen, place)
                self._progressed(len(micro.ids) * self._cost(micro))
            if not any(self._cost(micro) > 1 for micro in microbatches):
                for parameter in self._trained:  # AdamW's momentum moves on, which it does not without a gradient
                    parameter.grad = torch.zeros_like(parameter)
            norm = float(torch.nn.utils.clip_grad_norm_(self._trained, self.settings.grad_clip))
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

    def _loss(self, micro: MicroBatch, objective: Objective, seen: _Seen | None, place: str) -> float:
        """The share of ``micro`` in the loss; its gradient is added to that of the weights.

        The loss is a sum over tokens: some at a time go through output layer and loss and back at once, so that their
        logits are computed once and forgotten, and then all together back through the layers.
        """
        total, trained = 0.0, self._cost(micro) > 1
        with torch.set_grad_enabled(trained):
            with self._computing:
                hidden = hidden_at(self.model, micro)
            cut = hidden.detach().requires_grad_(trained)
            for index, log_probs, entropy in self._pieces(self.model, micro, cut):
                loss = objective.loss(index, log_probs)
                if not math.isfinite(value := loss.item()):
                    raise TrainerError(f"the loss of {place} is {value}; no step was taken on it. Lower lr.")
                total += value
                if trained:
                    loss.backward()
                if seen is not None:
                    seen.log_probs[index] = log_probs.detach().to(seen.log_probs.dtype)
                    seen.entropy[index] = entropy.to(seen.entropy.dtype)
            if trained:
                hidden.backward(cut.grad)
        return total

    @torch.no_grad()
    def _score(self, model: Any, microbatches: list[MicroBatch], n_tokens: int) -> _Seen:
        """Log-prob and entropy of every token under the mask, in the order of the batch."""
        seen = _Seen(*(torch.empty(n_tokens, device=self._device) for _ in range(2)))
        for micro in microbatches:
            with self._computing:
                hidden = hidden_at(model, micro)
            for index, log_probs, entropy in self._pieces(model, micro, hidden):
                seen.log_probs[index] = log_probs.to(seen.log_probs.dtype)
                seen.entropy[index] = entropy.to(seen.entropy.dtype)
            self._progressed(len(micro.ids))
        return seen

    def _pieces(self, model: Any, micro: MicroBatch, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of the tokens under the mask, some at a time: their places in the batch, log-probs, and entropies (without
        gradient), given what the model knows before them, ``hidden`` ``[N, hidden]``."""
        size = LOGITS_CHUNK
        parts = (
            hidden.split(size),
            self._tensor(micro.targets).split(size),
            self._tensor(micro.token_index).split(size),
        )
        for number, (part, targets, index) in enumerate(zip(*parts, strict=True)):
            logits = logits_of(model, part.to(model.dtype))  # in bfloat16 they would be rounded by hundredths of a nat
            if micro.nucleus is not None:
                own = micro.nucleus.of(np.arange(number * size, number * size + len(targets)))
                kept = (self._tensor(values.astype(np.int64)) for values in (own.ids, np.diff(own.offsets)))
                logits = keep_nucleus(logits, targets, *kept)
            log_probs = token_log_probs(logits, targets, temperature=self._temperature)
            with torch.no_grad():
                entropy = token_entropy(logits, temperature=self._temperature)
            del logits  # else they outlive their gradient until the next ones are there
            yield index, log_probs, entropy

    def _cost(self, micro: MicroBatch) -> int:
        """In forward passes; one with a backward pass counts as three. The loss of tokens without an advantage is 0
        whatever the weights, but for a penalty."""
        return 3 if micro.has_advantage or self.settings.kl_coef else 1

    def _progressed(self, ids: int) -> None:
        self._done += ids
        if self.on_progress is not None:
            self.on_progress(min(1.0, self._done / self._planned))

    def _microbatches(self, batch: TrainBatch, samples: Sequence[int] | np.ndarray) -> list[MicroBatch]:
        size = self.settings.max_tokens_per_microbatch
        return list(make_microbatches(batch, samples, max_tokens=size, sharing=packs(self.model)))

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

    @in_own_thread
    def save_weights(self, directory: str | os.PathLike[str], *, dtype: WeightsDtype = "float32") -> None:
        """Write the weights (adapters merged into them) as a Hugging Face checkpoint, with the config and tokenizer
        files of ``model_path``. ``dtype`` is what they are rounded to: an engine that computes in bfloat16 would round
        them itself. The directory appears, or is replaced, as a whole or not at all; raises ``TrainerError`` when it
        cannot be written."""
        self._write(directory, state=None, dtype=dtype)

    @in_own_thread
    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the weights as :meth:`save_weights` does, and the state of the optimizer and the counters with them,
        with the checksums of all, through to the disk."""
        state = {"format": _STATE_FORMAT, "optimizer": self._optimizer.state_dict()["state"]}
        if self.settings.lora_rank:
            adapters = {name: tensor.detach() for name, tensor in lora.adapter_weights(self.model).items()}
            state |= {"adapters": adapters, "base": lora.checksum(self.model)}
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
                    with (fresh / _STATE_FILE).open("wb") as file:  # of a path it would not say why it failed
                        torch.save(state, file)
                    write_checksums(fresh)
        except OSError as error:
            raise TrainerError(f"{directory} cannot be written: {error}") from error

    @in_own_thread
    def load(self, directory: str | os.PathLike[str]) -> None:
        """Go on exactly where :meth:`save` was called: weights (or adapters, on the same weights), optimizer, counters
        and seed. The settings, learning rate included, stay those of this trainer, and so does the start policy of the
        KL term.

        Raises:
            TrainerError: ``directory`` does not hold what ``save`` writes, or it is of another model. Nothing has
                changed then.
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
            raise TrainerError(f"{path} is not a state of format {_STATE_FORMAT}; another version has written it.")
        if with_adapters != ("adapters" in state):
            how, fix = ("with", "set the same") if not with_adapters else ("without", "leave it out")
            raise TrainerError(f"what is in {directory} was trained {how} lora_rank; {fix}.")
        if with_adapters:
            current, saved = lora.adapter_weights(self.model), state["adapters"]
            if state["base"] != lora.checksum(self.model):
                raise TrainerError(f"the adapters in {directory} belong to other weights than those in {self._source}.")
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

    def _set_threads(self) -> None:
        set_threads(self._torch_threads, self.model)
