"""The policy loss, on flat tensors with one entry per token under the loss mask.

The loss of a minibatch is the weighted sum ``sum_t w_t (policy_t + kl_coef * kl_t)``; the weights contain the whole
aggregation, so the sum may be split in any way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from agl_slime.errors import TrainerError
from agl_slime.train.local.functions import user_function
from agl_slime.train.local.settings import LocalTrainerSettings

MAX_STALENESS = 4
"""Largest staleness with a metrics series of its own; larger values count as this one."""
MAX_LOG_RATIO = 20.0
"""Ratios of probabilities are clamped to ``exp`` of this; float32 overflows soon after."""


_NEVER = -1e30  # a logit without probability at any temperature; unlike -inf, 0 times it is 0


class PolicyTerms(NamedTuple):
    """Terms of the loss, ``[N]`` each, one entry per token."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor
    """1.0 for tokens on the clipped branch, which have no gradient (with CISPO: a bounded weight)."""


def token_log_probs(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """``log softmax(logits / temperature)[target]``, ``[N]``, in float32 or better; ``logits`` ``[N, vocabulary]`` and
    ``targets`` ``[N]`` token ids."""
    scaled = _scale(logits, temperature)
    return scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)


def keep_nucleus(logits: Tensor, targets: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
    """``logits`` ``[N, vocabulary]`` restricted to the candidates of each token: ``counts`` ``[N]`` of the concatenated
    ``ids``, and the target, which the engine's rounding may have excluded. Rows without ids keep all."""
    keep = (counts == 0).unsqueeze(1).expand_as(logits).clone()
    rows = torch.repeat_interleave(torch.arange(len(counts), device=logits.device), counts)
    keep[rows, ids] = True
    keep[torch.arange(len(targets), device=logits.device), targets] = True
    return logits.masked_fill(~keep, _NEVER)


def token_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """``-sum_v p_v log p_v`` of ``p = softmax(logits / temperature)``, in nats, ``[N]``."""
    log_p = _scale(logits, temperature).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def policy_terms(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyTerms:
    """PPO's clipped surrogate (arXiv:1707.06347, eq. 7), negated to be minimised: ``-min(r A, clip(r, 1 - low, 1 +
    high) A)``, where ``r = exp(log_probs - old_log_probs)``.

    ``clip_high`` above ``clip_low`` is the "clip-higher" of DAPO (arXiv:2503.14476, section 3.1). All arguments and
    results are ``[N]``.
    """
    ratio = _ratio(log_probs, old_log_probs)
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return PolicyTerms(loss=torch.maximum(free, bounded), ratio=ratio, clipped=(bounded > free).to(ratio.dtype))


def sequence_terms(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    sequence_log_ratios: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyTerms:
    """GSPO's clipped surrogate (arXiv:2507.18071, eq. 5-7), negated, with the token-level form of its gradient (eq. 13
    and 14): ``-min(s A, clip(s, 1 - low, 1 + high) A)``, where ``s = exp(mean_t(log_probs - old_log_probs))`` over the
    tokens of a rollout.

    ``sequence_log_ratios`` ``[N]`` are the means over each token's rollout (:func:`sequence_means`), constants, since
    the tokens of a rollout may be in several calls: each token contributes its part of the gradient of ``s``, times its
    own advantage. Eq. 5 is the mean over the tokens of a rollout, the aggregation "rollout".
    """
    shift = log_probs - log_probs.detach()  # 0, with the token's gradient
    of_sequence, zeros = sequence_log_ratios + shift, torch.zeros_like(old_log_probs)
    return policy_terms(of_sequence, zeros, advantages, clip_low=clip_low, clip_high=clip_high)


def weighted_terms(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> PolicyTerms:
    """CISPO's loss (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5), negated: ``-sg(clip(r, 1 - low, 1 + high)) A
    log_probs``, where ``sg`` stops the gradient: the weight is bounded, and every token keeps a gradient.

    The paper has no lower bound (``clip_low`` 1) and the aggregation "token".
    """
    ratio = _ratio(log_probs, old_log_probs)
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high).detach()
    return PolicyTerms(loss=-weight * advantages * log_probs, ratio=ratio, clipped=(weight != ratio).to(ratio.dtype))


@functools.cache
def policy_loss(name: str) -> Callable[..., PolicyTerms]:
    """The terms of the loss ``name``: "ppo", "cispo", or a user's function ``path/to/file.py:name`` with the
    arguments of ``policy_terms``, which returns the loss ``[N]`` or ``PolicyTerms``. Raises ``ConfigError``
    without such a function."""
    if name in ("ppo", "cispo"):
        return policy_terms if name == "ppo" else weighted_terms
    function = user_function(name, flag="--local.loss")

    def user_terms(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, **bounds: float) -> PolicyTerms:
        terms = function(log_probs, old_log_probs, advantages, **bounds)
        loss = terms.loss if isinstance(terms, PolicyTerms) else terms
        if not isinstance(loss, Tensor) or loss.shape != log_probs.shape:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise TrainerError(
                f"--local.loss {name} returned {shape}; return a loss per token, {list(log_probs.shape)}"
            )
        if isinstance(terms, PolicyTerms):
            return terms
        return PolicyTerms(loss=loss, ratio=_ratio(log_probs, old_log_probs), clipped=torch.zeros_like(log_probs))

    return user_terms


def sequence_means(values: Tensor, rollouts: Tensor) -> Tensor:
    """The mean of ``values`` ``[N]`` over the tokens of each token's rollout, ``[N]``; ``rollouts`` ``[N]`` are numbers
    from 0."""
    counts = torch.bincount(rollouts).clamp_min(1)
    return (torch.bincount(rollouts, weights=values.double()) / counts)[rollouts].to(values.dtype)


def off_policy_weights(
    old_log_probs: Tensor, engine_log_probs: Tensor, settings: LocalTrainerSettings
) -> tuple[Tensor, Tensor]:
    """The importance weight of each token in the policy loss, and 1.0 for tokens whose weight is not the plain ratio
    ``k = exp(old - engine)``; ``[N]`` each, constants.

    The objective is decoupled PPO's (Hilton, Cobbe and Schulman 2022, arXiv:2110.00641): the engine's policy is the
    *behaviour* policy of ``k``, the trainer's before the first step is the *proximal* policy of ``policy_terms``:
    ``-k min(r A, clip(r) A)``. The weight is

    - ``tis``: ``min(k, tis_clip)``, truncated importance sampling (Yao et al. 2025, "Your Efficient RL Framework
      Secretly Brings You Off-Policy RL Training"); slime's ``--use-tis`` with its ``--tis-clip-low`` of 0.
    - ``icepop``: ``k`` within ``icepop_range``, else 0 (Ring-1T, arXiv:2510.18855); slime's ``icepop_function``, which
      takes the bounds from ``--tis-clip-low`` and ``--tis-clip``.

    Decoupled PPO's plain ``k`` is ``tis`` with a very large ``tis_clip``.
    """
    ratio = _ratio(old_log_probs, engine_log_probs)
    if settings.off_policy == "tis":
        weights = ratio.clamp(max=settings.tis_clip)
    else:
        low, high = settings.icepop_range
        weights = torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
    return weights, (weights != ratio).to(ratio.dtype)


def kl_k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Schulman's k3 estimate of ``KL(policy || reference)`` from samples of the policy: ``exp(d) - 1 - d`` with ``d =
    reference - lp``.

    Unbiased and never negative (http://joschu.net/blog/kl-approx.html); GRPO's penalty (arXiv:2402.03300, eq. 4).
    ``[N]``.
    """
    d = (reference_log_probs - log_probs).clamp(max=MAX_LOG_RATIO)
    return d.expm1() - d


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, kind: str) -> Tensor:
    """Schulman's k1, k2 or k3, by the names of slime's ``--kl-loss-type``; ``low_var_kl`` is k3 within 10. ``[N]``."""
    difference = log_probs - reference_log_probs
    if kind in ("k1", "k2"):
        return difference if kind == "k1" else difference**2 / 2
    k3 = kl_k3(log_probs, reference_log_probs)
    return k3.clamp(-10, 10) if kind == "low_var_kl" else k3


def teacher_advantages(
    advantages: Tensor, log_probs: Tensor, teacher_log_probs: Tensor, *, coef: float
) -> tuple[Tensor, Tensor]:
    """``advantages - coef * k`` with the per-token reverse KL ``k = log_probs - teacher_log_probs``, and ``k``; ``[N]``
    each, constants.

    On-policy distillation (Lu and Thinking Machines Lab 2025, "On-Policy Distillation"; Agarwal et al.,
    arXiv:2306.13649, with the reverse KL of Gu et al., arXiv:2306.08543): on tokens of the policy the mean of ``k`` is
    an unbiased estimate of ``KL(policy || teacher)``, and each token is credited with its own term only (a discount of
    0). slime's ``--use-opd`` with ``--opd-kl-coef``. ``log_probs`` are the sampling policy's, at its temperature, the
    teacher's at temperature 1.
    """
    reverse_kl = log_probs - teacher_log_probs
    return advantages - coef * reverse_kl, reverse_kl


def token_weights(
    aggregation: Literal["token", "rollout", "constant"],
    *,
    rollout_mask_sums: Tensor,
    n_tokens: int,
    n_rollouts: int,
    n_minibatches: int,
    max_tokens: int = 1,
) -> Tensor:
    """The weight of each token of a batch in the loss of its minibatch, ``[N]``; ``rollout_mask_sums`` ``[N]`` are the
    tokens under the mask in all samples of the token's rollout.

    ``"token"``: ``n_minibatches / n_tokens``, equal for all tokens, as in DAPO (arXiv:2503.14476, section 3.3).
    ``"rollout"``: ``n_minibatches / (n_rollouts * max(rollout_mask_sum, 1))``, equal for all rollouts of any length and
    number of samples; slime's default reducer.
    ``"constant"``: ``n_minibatches / (n_rollouts * max_tokens)``, Dr. GRPO's (arXiv:2503.20783, section 3.2): the sum
    over the tokens of a rollout by a constant, the longest response.

    The denominators are an average minibatch's, so the losses of the minibatches average to the batch's loss.
    """
    if aggregation == "token":
        return torch.full_like(rollout_mask_sums, n_minibatches / n_tokens, dtype=torch.float32)
    if aggregation == "constant":
        return torch.full_like(rollout_mask_sums, n_minibatches / (n_rollouts * max_tokens), dtype=torch.float32)
    return n_minibatches / (n_rollouts * rollout_mask_sums.clamp_min(1).to(torch.float32))


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The KL term of a loss: the reference's log-probs ``[n_tokens]``, the term's coefficient, and its estimate."""

    log_probs: Tensor
    coef: float
    kind: str = "k3"


@dataclass
class Objective:
    """The loss of a batch, one microbatch at a time, and its metrics. Tensors are ``[n_tokens]``: one entry per token
    under the loss mask, in the order of the batch, without gradient."""

    settings: LocalTrainerSettings
    old_log_probs: Tensor
    advantages: Tensor
    weights: Tensor
    reference: Reference | None = None
    engine_log_probs: Tensor | None = None
    """The engine's log-probs at sampling; needed unless ``off_policy`` is "none"."""
    staleness: Tensor | None = None
    """int64: weight versions between sampling and training of each token; below 0 if unknown."""
    sequence_log_ratios: Tensor | None = None
    """The mean log-ratio of each token's rollout under the weights in training; needed for the loss "gspo"."""
    rollouts: Tensor | None = None
    """The number of each token's rollout; needed for an off-policy weight in the loss "gspo"."""

    tokens: int = 0
    """Tokens of all calls of ``loss`` so far."""
    ratio_dev_max: float = 0.0
    """Largest ``|ratio - 1|`` so far."""
    _sums: dict[str, float] = field(default_factory=dict)
    _by_staleness: dict[str, Tensor] = field(default_factory=dict)
    _off_policy: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        if self.settings.off_policy != "none":
            assert self.engine_log_probs is not None
            weights, clipped = off_policy_weights(self.old_log_probs, self.engine_log_probs, self.settings)
            if self.settings.loss == "gspo":
                # a rollout's tokens have one loss, whose factor is the mean of theirs; ``sequence_terms`` gives each
                # token a part of the gradient, which a factor of its own would change
                assert self.rollouts is not None
                weights = sequence_means(weights, self.rollouts)
            self._off_policy = weights, clipped

    def loss(self, index: Tensor, log_probs: Tensor) -> Tensor:
        """The loss of the tokens at ``index`` ``[N]`` with their current ``log_probs`` ``[N]``; a scalar with
        gradient."""
        old = self.old_log_probs[index]
        terms = self.terms(index, log_probs, old)
        per_token = terms.loss
        if self._off_policy is not None:
            per_token = per_token * self._off_policy[0][index]
        with torch.no_grad():
            self.tokens += len(index)
            self.ratio_dev_max = max(self.ratio_dev_max, float((terms.ratio - 1).abs().max()))
            self._add("train/clip_fraction", terms.clipped)
            self._add("train/log_ratio_clamped", ((log_probs - old).abs() > MAX_LOG_RATIO).to(log_probs.dtype))
            self._add("train/kl", kl_k3(old, log_probs))  # the tokens were sampled from the old policy
            self._compare(index, log_probs if self.settings.old_log_probs == "engine" else old)
        if (reference := self.reference) is not None:
            kl = kl_estimate(log_probs, reference.log_probs[index], reference.kind)
            per_token = per_token + reference.coef * kl
            self._add("train/reference_kl", kl.detach())
        return (self.weights[index] * per_token).sum()

    def terms(self, index: Tensor, log_probs: Tensor, old: Tensor) -> PolicyTerms:
        """The policy loss of the tokens at ``index`` before its importance weight, with their ``old`` log-probs."""
        clip, high = self.settings.clip, self.settings.clip_high
        bounds = {"clip_low": clip, "clip_high": clip if high is None else high}
        if self.settings.loss == "gspo":
            assert self.sequence_log_ratios is not None
            means = self.sequence_log_ratios[index]
            return sequence_terms(log_probs, old, self.advantages[index], sequence_log_ratios=means, **bounds)
        return policy_loss(self.settings.loss)(log_probs, old, self.advantages[index], **bounds)

    def metrics(self) -> dict[str, float]:
        """Means over the tokens of all calls of ``loss``; with ``/staleness_k`` over tokens of staleness ``k``
        (``MAX_STALENESS`` includes all above); ``train/share`` is their share."""
        means = {name: total / self.tokens for name, total in self._sums.items()}
        counts = self._by_staleness.get("train/share")
        if counts is not None:
            for name, sums in self._by_staleness.items():
                total = counts.sum() if name == "train/share" else counts
                means |= {f"{name}/staleness_{k}": float(v) for k, v in enumerate(sums / total) if counts[k]}
        return means

    def _compare(self, index: Tensor, log_probs: Tensor) -> None:
        """Add the divergence of the trainer from the engine, by staleness."""
        if self.engine_log_probs is None:
            return
        terms = {"train/engine_kl": kl_k3(self.engine_log_probs[index], log_probs)}
        if self._off_policy is not None:
            terms["train/off_policy_weight"], terms["train/off_policy_clipped"] = (
                each[index] for each in self._off_policy
            )
        for name, values in terms.items():
            self._add(name, values)
        if self.staleness is not None:
            has_staleness = self.staleness[index] >= 0
            ages = self.staleness[index][has_staleness].clamp(max=MAX_STALENESS)
            for name, values in {**terms, "train/share": torch.ones_like(log_probs)}.items():
                sums = torch.bincount(ages, weights=values[has_staleness].double(), minlength=MAX_STALENESS + 1)
                self._by_staleness[name] = self._by_staleness.get(name, 0) + sums

    def _add(self, name: str, values: Tensor) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + float(values.sum())


def _ratio(log_probs: Tensor, reference: Tensor) -> Tensor:
    return (log_probs - reference).clamp(max=MAX_LOG_RATIO).exp()


def _scale(logits: Tensor, temperature: float) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1.0 else logits / temperature
