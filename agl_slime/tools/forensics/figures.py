"""The figures of a training step from log-probs alone, without a model, as slime logs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agl_slime.train.local.batch import TrainBatch
from agl_slime.train.local.loss import Objective, kl_k3, off_policy_weights, sequence_means, token_weights
from agl_slime.train.local.settings import LocalTrainerSettings


def step_figures(
    batch: TrainBatch,
    log_probs: Sequence[NDArray[Any]],
    settings: LocalTrainerSettings,
    *,
    kl_loss: NDArray[Any] | None = None,
    kl_loss_coef: float = 0.0,
) -> dict[str, float]:
    """The loss of ``batch`` as one step at the policy with ``log_probs``, the tokens' under the mask of each Sample,
    and its parts, under slime's names; means are slime's, over rollouts unless ``aggregation`` is "token".
    ``kl_loss`` ``[n_tokens]`` is added with its coefficient. The ratio of "gspo" is a Sample's, as slime's."""
    new = torch.from_numpy(np.concatenate(log_probs).astype(np.float32))
    engine = None if batch.token_log_probs is None else torch.from_numpy(batch.token_log_probs)
    old = engine if settings.old_log_probs == "engine" and engine is not None else new
    weights = token_weights(
        settings.aggregation,
        rollout_mask_sums=torch.from_numpy(batch.token_rollout_mask_sums),
        n_tokens=batch.n_tokens,
        n_rollouts=batch.n_rollouts,
        n_minibatches=1,
    )
    of_sample = torch.from_numpy(np.repeat(np.arange(batch.n_samples), batch.token_counts))
    means = sequence_means(new - old, of_sample)
    objective = Objective(
        settings=settings,
        old_log_probs=old,
        advantages=torch.from_numpy(batch.token_rewards.astype(np.float32)),
        weights=weights,
        engine_log_probs=engine,
        sequence_log_ratios=means,
        rollouts=of_sample,
    )
    every = torch.arange(batch.n_tokens)
    pg_loss = float(objective.loss(every, new))

    def mean(values: torch.Tensor) -> float:
        return float((weights * values).sum())

    terms = objective.terms(every, new, old)
    figures = {"train/loss": pg_loss, "train/pg_loss": pg_loss, "train/pg_clipfrac": mean(terms.clipped)}
    figures["train/ppo_kl"] = mean(-means if settings.loss == "gspo" else old - new)
    if kl_loss is not None:
        figures["train/kl_loss"] = mean(torch.from_numpy(kl_loss))
        figures["train/loss"] += kl_loss_coef * figures["train/kl_loss"]
    if engine is not None:
        gaps = (new - engine).abs()
        figures["train/train_rollout_logprob_abs_diff"] = mean(gaps)
        figures["train/logprob_diff_max"] = float(gaps.max())
        figures["train/engine_kl"] = mean(kl_k3(engine, new))
        if settings.off_policy != "none":
            _, clipped = off_policy_weights(old, engine, settings)
            figures |= {"train/tis": mean((old - engine).exp()), "train/tis_clipfrac": mean(clipped)}
    return figures
