"""Settings of the local trainer; importable without torch, so that a command line can be derived from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from agl_slime.data.credit import CREDITS, Credit, reward_terms
from agl_slime.errors import ConfigError
from agl_slime.support.ranges import check_ranges

WeightsDtype = Literal["float32", "bfloat16"]
"""The dtype of weights that are pushed to the engine."""

LARGE_MODEL = 10_000_000
"""Parameters from which on the tiny policy's settings do not suit a model."""


def default_lr(n_parameters: int, *, lora: bool) -> float:
    """The learning rate for a model of that size: of the first command, of SmolLM2-135M's run in docs/measured.md, of
    slime's scripts for models of billions; adapters learn with ten times as much (docs/trainer.md)."""
    if n_parameters < LARGE_MODEL:
        return 5e-4
    return (2e-5 if n_parameters < 1_000_000_000 else 1e-6) * (10 if lora else 1)


@dataclass(frozen=True, kw_only=True)
class LocalTrainerSettings:
    """GRPO/PPO-clip. The defaults suit a policy of some 128k parameters, but for the learning rate, which is chosen by
    the model's size."""

    lr: float | None = None
    """Learning rate of AdamW, constant after the warm-up; by default 5e-4 below 10 million parameters, 2e-5 below a
    billion, else 1e-6, and ten times the latter two with LoRA."""
    warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly to ``lr``."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's decay rates for the mean and the square of the gradient."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay, on matrices only (not on norms and biases)."""
    grad_clip: float = 0.3
    """Largest 2-norm of the gradient of a step; larger gradients are scaled down."""
    clip: float = 0.2
    """PPO's clip range: the ratio is clipped to ``[1 - clip, 1 + clip_high]``."""
    clip_high: float | None = None
    """Upper clip range; ``clip`` when not set (DAPO uses 0.28 with a lower 0.2)."""
    n_minibatches: int = 4
    """Optimizer steps per epoch; the rollouts are divided evenly among them."""
    epochs: int = 1
    """Passes over each batch."""
    kl_coef: float = 0.0
    """Coefficient of the KL divergence to the start policy; above 0 a frozen copy of it is kept in memory."""
    loss: str = "ppo"
    """Policy loss: ppo (the ratio of each token, clipped), gspo (the ratio of the rollout, clipped; its clip ranges are
    some 0.0003), cispo (the clipped ratio as a weight; clip 1 for no lower bound), or path/to/file.py:function, with
    the arguments of ``agl_slime.train.local.loss.policy_terms`` and one loss per token as result."""
    aggregation: Literal["token", "rollout", "constant"] = "token"
    """Loss aggregation: every token weighs the same, every rollout (slime's default), or every token of max_response
    (Dr. GRPO, with no-std-normalization)."""
    max_response: int = 0
    """Sampled tokens of the longest rollout, for aggregation constant and for overlong_buffer."""
    overlong_buffer: int = 0
    """DAPO's penalty of long rollouts: the last tokens before max_response, over which it falls from 0 to -1; 0 is
    none."""
    old_log_probs: Literal["engine", "recompute"] = "engine"
    """Old log-probs of the PPO ratio: the engine's, or the trainer's own before the first step."""
    off_policy: Literal["none", "tis", "icepop"] = "none"
    """Importance weight of off-policy tokens, from the ratio of the trainer's probability before the first step to the
    engine's: none (1), tis (the ratio, at most tis_clip), or icepop (the ratio within icepop_range, else 0). Needs
    old_log_probs recompute."""
    tis_clip: float = 2.0
    """Largest importance weight with off_policy tis; slime's default."""
    icepop_range: tuple[float, float] = (0.5, 5.0)
    """Range of ratios outside which off_policy icepop masks tokens; the values of Ring-1T."""
    rewards_normalization: bool = True
    """Advantages: subtract the mean reward of the prompt group."""
    std_normalization: bool = True
    """Advantages: also divide by the standard deviation of the prompt group."""
    advantage: str | None = None
    """Advantages by path/to/file.py:function, in place of both normalizations: from the rewards ``[n]`` and the groups'
    numbers ``[n]`` of a batch's rollouts, the advantages ``[n]``."""
    metric: str | None = None
    """Metrics by path/to/file.py:function, as ``user/NAME``: from a batch's ``log_probs``, ``old_log_probs``,
    ``advantages``, ``entropy`` and ``rollouts`` (numbers from 0), ``[n]`` each with an entry per sampled token, a dict
    of numbers by name."""
    credit: Credit = "group"
    """Credit of a token: group (its turn's reward, else the rollout's), turn (both, turns by number: turn-level GRPO),
    or anchor (the rollout's, and its return among turns that answer the same text: GiGPO)."""
    rewards: str = ""
    """The rewards to train on by name, with weights: right=1,format=0.2 (each normalized in its group, then added),
    right+format=0.2 (added before) or right,format? (only where right is equal); by default the first of the first
    rollout."""
    lora_rank: int = 0
    """Rank of LoRA adapters (with peft), which are trained instead of the weights; 0 trains all weights."""
    lora_alpha: float = 32.0
    """LoRA's alpha: the adapters' output is scaled by ``lora_alpha / lora_rank``."""
    lora_targets: tuple[str, ...] = ()
    """Names of the layers with adapters, such as ``q_proj``; by default all linear layers but the output layer."""
    max_tokens_per_microbatch: int = 4096
    """Tokens per forward pass, a shared prompt counted once; bounds memory, does not change the result."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time, same result."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the layers' computation; weights, log-probs and the optimizer stay float32. auto is bfloat16 on a CUDA
    device that has it, else float32, the embedded engine's dtype."""

    device: str = "cpu"
    """A torch device, such as ``cpu`` or ``cuda:0``; ``auto`` is ``cuda`` if available."""

    @property
    def reward_key(self) -> str | None:
        """The primary reward, which turns, filters and reports have."""
        terms = reward_terms(self.rewards)
        return terms[0].weights[0][0] if terms else None

    def __post_init__(self) -> None:
        reward_terms(self.rewards)
        check_ranges(
            self,
            ("lr lora_alpha", lambda value: 0 < value < math.inf, "above 0"),
            ("weight_decay kl_coef", lambda value: 0 <= value < math.inf, "at least 0"),
            ("warmup_steps lora_rank max_response overlong_buffer", lambda value: value >= 0, "at least 0"),
            ("n_minibatches epochs max_tokens_per_microbatch", lambda value: value >= 1, "at least 1"),
            ("compute_dtype", ("auto", "float32", "bfloat16").__contains__, "'auto', 'float32' or 'bfloat16'"),
            ("betas", lambda value: len(value) == 2 and all(0 <= beta < 1 for beta in value), "two numbers in [0, 1)"),
            ("grad_clip", lambda value: value > 0, "above 0 (inf for no clipping)"),
            ("clip", lambda value: 0 < value <= 1, "in (0, 1]"),
            ("clip_high", lambda value: value > 0, "above 0"),
            ("loss", lambda name: name in ("ppo", "gspo", "cispo") or ":" in name, "ppo, gspo, cispo or FILE.py:NAME"),
            ("advantage metric", lambda name: ":" in name, "FILE.py:NAME"),
            ("aggregation", ("token", "rollout", "constant").__contains__, "'token', 'rollout' or 'constant'"),
            ("credit", CREDITS.__contains__, "'group', 'turn' or 'anchor'"),
            ("old_log_probs", lambda value: value in ("engine", "recompute"), "'engine' or 'recompute'"),
            ("off_policy", lambda value: value in ("none", "tis", "icepop"), "'none', 'tis' or 'icepop'"),
            ("tis_clip", lambda value: 0 < value < math.inf, "above 0"),
            ("icepop_range", lambda v: len(v) == 2 and 0 <= v[0] <= v[1] < math.inf, "two numbers, the lower first"),
        )
        if self.advantage and not (self.rewards_normalization and self.std_normalization):
            raise ConfigError(f"advantage {self.advantage} replaces both normalizations; leave their flags out.")
        if self.overlong_buffer and self.overlong_buffer >= self.max_response:
            sizes = f"overlong_buffer is {self.overlong_buffer} and max_response {self.max_response}"
            raise ConfigError(f"{sizes}; set max_response to the sampled tokens of the longest rollout.")
        if self.aggregation == "constant" and not self.max_response:
            raise ConfigError("aggregation is 'constant' without max_response; set it to the longest rollout's tokens.")
        if self.max_response and self.aggregation != "constant" and not self.overlong_buffer:
            raise ConfigError(
                f"max_response is {self.max_response}; only aggregation 'constant' and overlong_buffer use it."
            )
        if self.credit != "group" and not self.rewards_normalization:
            raise ConfigError(f"credit is {self.credit!r} without rewards_normalization; set it, or leave credit out.")
        if self.off_policy != "none" and self.old_log_probs == "engine":
            fix = "set old_log_probs to 'recompute', or every importance ratio is 1"
            raise ConfigError(f"off_policy is {self.off_policy!r} with old_log_probs 'engine'; {fix}.")
        for name, used_by in (("tis_clip", "tis"), ("icepop_range", "icepop")):
            if (value := getattr(self, name)) != getattr(type(self), name) and self.off_policy != used_by:
                raise ConfigError(f"{name} is {value!r} and off_policy {self.off_policy!r}; only {used_by!r} uses it.")
        for name in ("lora_targets", "lora_alpha") if not self.lora_rank else ():
            if (value := getattr(self, name)) != getattr(type(self), name):
                raise ConfigError(f"{name} is {value!r} without adapters; set lora_rank as well.")
