"""slime's normalised rewards and advantages of a batch, from its figures per token and its flags (624b824): what
Megatron's actors compute before a step, without Megatron."""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from agl_slime.data.normalize import normalize_rewards
from agl_slime.errors import ConfigError, RewardError
from agl_slime.tools.slime_dumps.files import TrainedRow

Floats = NDArray[Any]
_EPS, _WHITENING_EPS = 1e-6, 1e-8  # slime's
_GROUP_RELATIVE = ("grpo", "gspo", "cispo")
_WITH_BASELINE = (*_GROUP_RELATIVE, "reinforce_plus_plus_baseline")
_LEFT_OUT = ("--eps-clip-c", "--use-opsm", "--use-unbiased-kl", "--custom-loss-function-path")
_LEFT_OUT += ("--custom-pg-loss-reducer-function-path", "--custom-advantage-function-path", "--entropy-coef")


@dataclass(frozen=True, kw_only=True)
class StepFlags:
    """slime's flags that decide a step, by their names in its ``args`` and with its defaults."""

    advantage_estimator: str = "grpo"
    rewards_normalization: bool = True
    grpo_std_normalization: bool = True
    normalize_advantages: bool = False
    reward_key: str = ""
    kl_coef: float = 0.0
    kl_loss_type: str = "k1"
    gamma: float = 1.0
    lambd: float = 1.0
    use_opd: bool = False
    opd_kl_coef: float = 1.0
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    use_rollout_logprobs: bool = False
    use_tis: bool = False
    tis_clip: float = 2.0
    tis_clip_low: float = 0.0
    custom_tis_function_path: str = ""
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    calculate_per_token_loss: bool = False
    rollout_temperature: float = 1.0
    rollout_top_p: float = 1.0
    rollout_top_k: float = -1
    lr: float = 1e-6
    clip_grad: float = 1.0
    specified: bool = False
    """Whether any flag is."""
    left_out: tuple[str, ...] = ()
    """Flags whose effect is not computed."""

    @classmethod
    def parse(cls, words: Sequence[str]) -> StepFlags:
        """The flags of slime's command line; other flags of slime are skipped. Raises ``ConfigError`` for a value that
        cannot be read."""
        parser = _Parser(add_help=False, allow_abbrev=False)
        for each in fields(cls):
            flag = f"--{each.name.replace('_', '-')}"
            if each.name in ("specified", "left_out"):
                continue
            if each.name in ("rewards_normalization", "grpo_std_normalization"):
                parser.add_argument(f"--disable-{flag[2:]}", dest=each.name, action="store_false", default=True)
            elif isinstance(each.default, bool):
                parser.add_argument(flag, action="store_true", default=each.default)
            else:
                parser.add_argument(flag, type=str if isinstance(each.default, str) else float, default=each.default)
        read, _ = parser.parse_known_args(list(words))
        named = tuple(word for word in words if word.partition("=")[0] in _LEFT_OUT)
        return cls(**vars(read), specified=bool(words), left_out=named)

    @property
    def custom_tis(self) -> str:
        """The function that weights tokens, if it is not slime's own."""
        path = self.custom_tis_function_path if self.use_tis else ""
        return "" if path.endswith(("vanilla_tis_function", "icepop_function")) else path

    @property
    def off_policy(self) -> Literal["none", "tis", "icepop"]:
        icepop = self.custom_tis_function_path.endswith("icepop_function")
        return "none" if not self.use_tis else "icepop" if icepop else "tis"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"slime's flags (after --): {message}")


@dataclass(frozen=True, kw_only=True)
class RewardRule:
    """A normalisation of rewards: of Samples at neighbouring places (slime's with full groups, ``size`` each), of the
    whole batch (slime's otherwise), of the rollouts of a prompt (``agl_slime.slime_hooks.normalize_rewards``), or
    none."""

    groups: Literal["place", "batch", "prompt", "none"]
    std: bool = True
    size: int = 0

    def __str__(self) -> str:
        if self.groups == "none":
            return "rewards as they are"
        scope = {"place": f"groups of {self.size} by place", "batch": "the whole batch as one group"}
        transformation = "minus the mean, over the standard deviation" if self.std else "minus the mean"
        return f"{transformation}, of {scope.get(self.groups, 'prompt groups, each rollout once')}"

    def apply(
        self,
        rewards: Sequence[float],
        *,
        prompts: Sequence[Hashable],
        rollouts: Sequence[Hashable],
        use: Sequence[bool],
    ) -> list[float]:
        """The normalised reward of each Sample; the arguments are parallel, and Samples without ``use`` have no part in
        baselines and get 0. Raises ``RewardError`` for Samples of one rollout with different rewards, where those count
        once."""
        places = [place for place, used in enumerate(use) if used]
        used_rewards = [rewards[place] for place in places]
        if self.groups == "prompt":
            groups, members = ([column[place] for place in places] for column in (prompts, rollouts))
            used_rewards = normalize_rewards(used_rewards, group_indices=groups, rollout_ids=members, std=self.std)
        elif self.groups != "none":
            size = self.size if self.groups == "place" else len(rewards)
            used_rewards = _normalize(used_rewards, [place // size for place in places], std=self.std)
        normalized = dict(zip(places, used_rewards, strict=True))
        return [normalized.get(place, 0.0) for place in range(len(rewards))]


def _normalize(rewards: Sequence[float], groups: Sequence[int], *, std: bool) -> list[float]:
    """In torch's float32, whose rounding gives equal rewards an advantage that is not 0."""
    import torch

    members: dict[int, list[int]] = defaultdict(list)
    for place, group in enumerate(groups):
        members[group].append(place)
    by_size: dict[int, list[list[int]]] = defaultdict(list)
    for places in members.values():
        by_size[len(places)].append(places)
    result = torch.tensor(rewards, dtype=torch.float32)
    for size, same_size in by_size.items():
        rows = result[torch.tensor(same_size)]
        rows = rows - rows.mean(dim=1, keepdim=True)
        if std:
            spread = rows.std(dim=1, keepdim=True) if size > 1 else torch.full_like(rows, torch.nan)
            rows = rows / (spread + _EPS)
        result[torch.tensor(same_size)] = rows
    return result.tolist()


def reward_rules(flags: StepFlags, prompts: Sequence[Hashable]) -> Iterator[RewardRule]:
    """The rules that a run with ``flags`` may have, the likeliest first; all where no flag is specified."""
    if flags.specified and not (flags.rewards_normalization and flags.advantage_estimator in _WITH_BASELINE):
        yield RewardRule(groups="none")
        return
    std = flags.grpo_std_normalization and flags.advantage_estimator in _GROUP_RELATIVE
    size, rest = divmod(len(prompts), len(set(prompts)))
    for with_std in (std,) if flags.specified else (True, False):
        if not rest:
            yield RewardRule(groups="place", std=with_std, size=size)
        yield RewardRule(groups="batch", std=with_std)
        yield RewardRule(groups="prompt", std=with_std)
    if not flags.specified:
        yield RewardRule(groups="none")


def find_rule(
    rules: Sequence[RewardRule], rewards: Sequence[float], recorded: Sequence[float | None], **columns: Any
) -> RewardRule:
    """The first of ``rules`` whose result is nearest to the ``recorded`` normalised rewards (``None``: unknown)."""
    differences: dict[RewardRule, float] = {}
    places = [place for place, value in enumerate(recorded) if value is not None]
    for rule in rules:
        try:
            result = rule.apply(rewards, **columns)
        except RewardError:
            continue
        differences[rule] = difference([result[place] for place in places], [recorded[place] for place in places])
    least = min(differences.values())
    return next(rule for rule, largest in differences.items() if largest <= least + 1e-6)


def difference(ours: Any, recorded: Any) -> float:
    """The largest difference of two arrays; NaN equals NaN and differs from any number by infinity."""
    first, second = (np.asarray(values, dtype="f8") for values in (ours, recorded))
    if not len(first):
        return 0.0
    with np.errstate(invalid="ignore"):
        gaps = np.where(first == second, 0.0, np.abs(first - second))
    gaps[np.isnan(first) & np.isnan(second)] = 0.0
    return float(np.nan_to_num(gaps, nan=np.inf).max())


@dataclass(frozen=True, kw_only=True)
class TokenAdvantages:
    """Figures of a Sample, one per response token."""

    advantages: Floats
    returns: Floats
    kl: Floats


def unknown_figures(rows: Sequence[TrainedRow], flags: StepFlags) -> list[str]:
    """The columns that advantages by ``flags`` need and some row lacks."""
    shaped = flags.kl_coef != 0 or flags.use_opd
    needed = {
        _policy(flags): shaped,
        "ref_log_probs": flags.kl_coef != 0,
        "teacher_log_probs": flags.use_opd,
        "values": flags.advantage_estimator == "ppo",
    }
    return [name for name, used in needed.items() if used and any(getattr(row, name) is None for row in rows)]


def token_advantages(rewards: Sequence[float], rows: Sequence[TrainedRow], flags: StepFlags) -> list[TokenAdvantages]:
    """The advantages of Samples with these normalised ``rewards``: group-relative (the reward at each token), of a
    critic (generalised advantage estimation, arXiv:1506.02438), or REINFORCE++'s (arXiv:2501.03262); with the KL term
    ``kl_coef`` in the reward, on-policy distillation, and whitening over the batch where the flags say so. No column
    of ``unknown_figures`` may be missing."""
    advantages = [_of_sample(reward, row, flags) for reward, row in zip(rewards, rows, strict=True)]
    if not flags.normalize_advantages:
        return advantages
    used = np.concatenate([figures.advantages[row.mask] for figures, row in zip(advantages, rows, strict=True)])
    mean, spread = used.mean(), np.sqrt(used.var(ddof=1 if len(used) > 1 else 0) + _WHITENING_EPS)
    return [
        TokenAdvantages(advantages=(figures.advantages - mean) / spread, returns=figures.returns, kl=figures.kl)
        for figures in advantages
    ]


def approximate_kl(log_probs: Floats, reference: Floats, kind: str) -> Floats:
    """slime's ``--kl-loss-type``: Schulman's k1, k2 or k3 (http://joschu.net/blog/kl-approx.html); ``low_var_kl`` is
    k3 within 10."""
    ratio = np.asarray(log_probs, dtype="f8") - np.asarray(reference, dtype="f8")
    if kind == "k1":
        return ratio
    if kind == "k2":
        return ratio**2 / 2
    k3 = np.expm1(-ratio) + ratio
    return k3.clip(-10, 10) if kind == "low_var_kl" else k3


def _policy(flags: StepFlags) -> str:
    return "engine" if flags.use_rollout_logprobs else "log_probs"


def _of_sample(reward: float, row: TrainedRow, flags: StepFlags) -> TokenAdvantages:
    zeros, policy = np.zeros(len(row.mask)), getattr(row, _policy(flags))
    kl = approximate_kl(policy, row.ref_log_probs, flags.kl_loss_type) if flags.kl_coef else zeros  # type: ignore[arg-type]
    if flags.advantage_estimator == "ppo":
        at_tokens = -flags.kl_coef * kl
        at_tokens[-1:] += reward
        values = np.asarray(row.values, dtype="f8")
        advantages = _discounted(at_tokens, values, flags.gamma, flags.lambd)
        returns = advantages + values
    elif flags.advantage_estimator == "reinforce_plus_plus":
        at_tokens = -flags.kl_coef * kl * row.mask
        at_tokens[np.flatnonzero(row.mask)[-1:]] += reward
        advantages = returns = _discounted(at_tokens, zeros, flags.gamma, 1.0)
    else:
        shaping = flags.kl_coef * kl if flags.advantage_estimator == "reinforce_plus_plus_baseline" else zeros
        advantages = returns = reward - shaping
    if flags.use_opd:
        advantages = advantages - flags.opd_kl_coef * (policy - row.teacher_log_probs)
    return TokenAdvantages(advantages=advantages, returns=returns, kl=kl)


def _discounted(rewards: Floats, values: Floats, gamma: float, lambd: float) -> Floats:
    """Generalised advantages; without values and with ``lambd`` 1 they are discounted returns."""
    result, discounted = np.zeros(len(rewards)), 0.0
    following = np.append(values[1:], 0.0)
    for place in range(len(rewards) - 1, -1, -1):
        discounted = rewards[place] + gamma * following[place] - values[place] + gamma * lambd * discounted
        result[place] = discounted
    return result
