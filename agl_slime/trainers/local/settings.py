"""Settings of the local trainer; importable without torch, so that a command line can be derived from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from agl_slime.errors import ConfigError
from agl_slime.support.ranges import check_ranges


@dataclass(frozen=True, kw_only=True)
class LocalTrainerSettings:
    """GRPO/PPO-clip. The defaults suit a policy of some 128k parameters; large models want a learning rate some hundred
    times smaller."""

    lr: float = 5e-4
    """Learning rate of AdamW, constant after the warm-up."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly to ``lr``."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's decay rates for the mean and the square of the gradient."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay, on matrices only (not on norms and biases)."""
    grad_clip: float = 0.3
    """Largest 2-norm of the gradient of a step; longer ones are scaled down."""
    clip: float = 0.2
    """PPO's clip range: the ratio is clipped to ``[1 - clip, 1 + clip_high]``."""
    clip_high: float | None = None
    """Upper clip range; ``clip`` when not set (DAPO uses 0.28 with a lower 0.2)."""
    n_minibatches: int = 4
    """Optimizer steps per epoch; the rollouts are divided evenly among them."""
    epochs: int = 1
    """Passes over each batch."""
    kl_coef: float = 0.0
    """Weight of the KL divergence to the start policy; above 0 a frozen copy of it is kept in memory."""
    aggregation: Literal["token", "sequence"] = "token"
    """Whether every token weighs the same, or every rollout (slime's default)."""
    temperature: float = 1.0
    """The sampling temperature of the rollouts: log-probs are those of ``softmax(logits / temperature)``."""
    old_log_probs: Literal["engine", "recompute"] = "engine"
    """The denominator of the ratio: the engine's log-probs, or the trainer's own before the first step."""
    off_policy: Literal["none", "tis", "icepop"] = "none"
    """How tokens are weighed that other weights have sampled, by the probability that the trainer gives them before the
    first step over the engine's: not at all, by that ratio up to tis_clip, or by the ratio within icepop_range and else
    not trained. Needs old_log_probs recompute."""
    tis_clip: float = 2.0
    """Largest weight of a token with off_policy tis; slime's default."""
    icepop_range: tuple[float, float] = (0.5, 5.0)
    """Ratios of the tokens that off_policy icepop trains; the values of Ring-1T."""
    rewards_normalization: bool = True
    """Subtract the mean reward of the prompt group."""
    std_normalization: bool = True
    """Also divide by the standard deviation of the prompt group."""
    reward_key: str | None = None
    """Which reward to train on where samples carry a dict of them."""
    max_tokens_per_microbatch: int = 4096
    """Padded tokens per forward pass; bounds memory, does not change the result."""
    torch_threads: int | None = None
    """torch's CPU threads, set for the whole process; unset leaves them alone. More than 1 slows small models down."""
    device: str = "cpu"
    """A torch device, such as ``cpu`` or ``cuda:0``."""
    seed: int = 0
    """Seed of the order in which rollouts are divided among minibatches."""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            ("lr temperature", lambda value: 0 < value < math.inf, "above 0"),
            ("weight_decay kl_coef", lambda value: 0 <= value < math.inf, "at least 0"),
            ("warmup_steps seed", lambda value: value >= 0, "at least 0"),
            ("n_minibatches epochs max_tokens_per_microbatch torch_threads", lambda value: value >= 1, "at least 1"),
            ("betas", lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value), "two numbers in [0, 1)"),
            ("grad_clip", lambda value: value > 0, "above 0 (inf for no clipping)"),
            ("clip", lambda value: 0 < value <= 1, "in (0, 1]"),
            ("clip_high", lambda value: value > 0, "above 0"),
            ("aggregation", lambda value: value in ("token", "sequence"), "'token' or 'sequence'"),
            ("old_log_probs", lambda value: value in ("engine", "recompute"), "'engine' or 'recompute'"),
            ("off_policy", lambda value: value in ("none", "tis", "icepop"), "'none', 'tis' or 'icepop'"),
            ("tis_clip", lambda value: 0 < value < math.inf, "above 0"),
            ("icepop_range", lambda v: len(v) == 2 and 0 <= v[0] <= v[1] < math.inf, "two numbers, the lower first"),
        )
        if self.off_policy != "none" and self.old_log_probs == "engine":
            fix = "set old_log_probs to 'recompute', or the ratio that it weighs tokens by is 1"
            raise ConfigError(f"off_policy is {self.off_policy!r} with old_log_probs 'engine'; {fix}.")
        for name, used_by in (("tis_clip", "tis"), ("icepop_range", "icepop")):
            if (value := getattr(self, name)) != getattr(type(self), name) and self.off_policy != used_by:
                raise ConfigError(f"{name} is {value!r} and off_policy {self.off_policy!r}; only {used_by!r} uses it.")
