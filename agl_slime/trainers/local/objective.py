"""The loss of a batch, one microbatch at a time, and what is measured on the way."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from agl_slime.trainers.local.loss import kl_k3, policy_terms
from agl_slime.trainers.local.settings import LocalTrainerSettings


@dataclass
class Objective:
    """Tensors are ``[n_tokens]``: one entry per token under the loss mask, in the order of the batch, without gradient."""

    settings: LocalTrainerSettings
    old_log_probs: Tensor
    advantages: Tensor
    weights: Tensor
    start_log_probs: Tensor | None = None
    """Log-probs under the start policy; needed when ``kl_coef`` is above 0."""

    tokens: int = 0
    """Tokens that have gone through the loss so far, each pass counted."""
    ratio_dev_max: float = 0.0
    """Largest ``|ratio - 1|`` so far."""
    _sums: dict[str, float] = field(default_factory=dict)

    def loss(self, index: Tensor, log_probs: Tensor) -> Tensor:
        """The share of the tokens at ``index`` ``[N]`` in the loss, given their current ``log_probs`` ``[N]``; a scalar
        with gradient."""
        old = self.old_log_probs[index]
        clip_high = self.settings.clip if self.settings.clip_high is None else self.settings.clip_high
        terms = policy_terms(log_probs, old, self.advantages[index], clip_low=self.settings.clip, clip_high=clip_high)
        per_token = terms.loss
        with torch.no_grad():
            self.tokens += len(index)
            self.ratio_dev_max = max(self.ratio_dev_max, float((terms.ratio - 1).abs().max()))
            self._add("train/clip_fraction", terms.clipped)
            self._add("train/kl", kl_k3(old, log_probs))  # the tokens were sampled from the old policy
        if self.start_log_probs is not None:
            kl = kl_k3(log_probs, self.start_log_probs[index])
            per_token = per_token + self.settings.kl_coef * kl
            self._add("train/kl_start", kl.detach())
        return (self.weights[index] * per_token).sum()

    def metrics(self) -> dict[str, float]:
        """Means over the tokens that have gone through the loss."""
        return {name: total / self.tokens for name, total in self._sums.items()}

    def _add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(values.sum())


__all__ = ["Objective"]
