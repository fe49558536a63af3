"""Reward normalisation per prompt group, one reward per rollout.

The group-relative baseline of GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1): a rollout's advantage is its reward
minus the mean reward of the rollouts of the same prompt, divided by their standard deviation. slime's release groups by
position in the batch, which is wrong as soon as a rollout becomes several samples or a group is incomplete; this module
groups by ``group_index``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence

from agl_slime.errors import RewardError
from agl_slime.tokens.reward import reward_number
from agl_slime.types import Sample

_EPS = 1e-6  # slime's
_EQUAL_REWARDS = 1e-6  # slime's own threshold


def all_equal(rewards: Sequence[float]) -> bool:
    """Whether all rewards are the same, within one tolerance for filters, metrics and advantages."""
    return max(rewards) - min(rewards) <= _EQUAL_REWARDS


def is_counted(sample: Sample) -> bool:
    """Whether a sample counts in its group's baseline: it did not fail and is not out of the loss."""
    return getattr(sample, "status", None) != Sample.Status.FAILED and not getattr(sample, "remove_sample", False)


def normalize_rewards(
    rewards: Sequence[float],
    *,
    group_indices: Sequence[Hashable],
    rollout_ids: Sequence[Hashable],
    std: bool = True,
    advantages: Callable[[Sequence[float], Sequence[int]], Sequence[float]] | None = None,
) -> list[float]:
    """The advantage of each sample: ``(r - mean) / (std + 1e-6)`` over the rollouts of its group, or ``r - mean``
    without ``std``, which is the unbiased estimate (``n - 1``) as in slime. ``advantages`` replaces the formula: from
    the rewards of the rollouts and the numbers of their groups, from 0, their advantages.

    The three sequences are parallel, one entry per sample. Samples with the same ``rollout_id`` are siblings: they
    count once and get the same advantage. A sample without ``rollout_id`` is a separate rollout, a rollout without
    ``group_index`` a separate group. A group of one rollout, or with ``all_equal`` rewards, gets exactly 0. Sums are
    exactly rounded: the order of the samples does not change the result.

    Raises:
        RewardError: a reward is NaN or infinite, siblings differ in reward or group, or the lengths differ.
    """
    if not len(rewards) == len(group_indices) == len(rollout_ids):
        lengths = f"{len(rewards)}, {len(group_indices)} and {len(rollout_ids)}"
        raise RewardError(f"rewards, group_indices and rollout_ids need one entry per sample, got lengths {lengths}.")
    rollouts: list[object] = [object() if rollout_id is None else rollout_id for rollout_id in rollout_ids]
    by_rollout: dict[object, tuple[float, Hashable]] = {}  # reward and group
    for position, (rollout, reward, group) in enumerate(zip(rollouts, rewards, group_indices, strict=True)):
        if not math.isfinite(reward):
            raise RewardError(f"the reward of sample {position} is {reward}; rewards must be finite numbers.")
        first_reward, first_group = by_rollout.setdefault(rollout, (float(reward), group))
        if first_reward != reward:
            raise RewardError(f"siblings of rollout {rollout} have different rewards, {first_reward} and {reward}.")
        if first_group != group:
            raise RewardError(f"siblings of rollout {rollout} are in different groups, {first_group} and {group}.")

    members: dict[object, list[object]] = {}
    for rollout, (_, group) in by_rollout.items():
        members.setdefault(object() if group is None else group, []).append(rollout)
    advantage_of: dict[object, float] = {}
    if advantages is None:
        for group in members.values():
            advantage_of.update(zip(group, _advantages([by_rollout[key][0] for key in group], std=std), strict=True))
    else:
        numbers = {key: number for number, group in enumerate(members.values()) for key in group}
        values = advantages([by_rollout[key][0] for key in numbers], [*numbers.values()])
        advantage_of.update(zip(numbers, values, strict=True))
    return [advantage_of[rollout] for rollout in rollouts]


def normalization_key(sample: Sample, part: str | None = None, *, by_number: bool = False) -> tuple[Hashable, Hashable]:
    """The group and the rollout by which to normalise a reward. ``part`` is a ``TurnReward.target``;
    its default is the sample's ``metadata["reward_of"]``. A reward of one turn is compared with the rewards of turns of
    the same role in the group, or of the group's other single turns, ``by_number`` those with the same number."""
    part = str((sample.metadata or {}).get("reward_of", "")) if part is None else part
    kind = "turn" if part.startswith("turn:") and not by_number else part
    group, rollout = sample.group_index, sample.rollout_id
    return (
        (group, kind) if part and group is not None else group,
        (rollout, part) if part and rollout is not None else rollout,
    )


def reward_value(sample: Sample, position: int, *, key: str | None = None) -> float:
    """The reward of a sample as a number, the one named ``key`` of several. Raises ``RewardError`` naming the sample's
    ``position`` when there is none."""
    under = f" under reward_key {key!r}" if key else ""
    reward = sample.reward.get(key) if isinstance(sample.reward, Mapping) and key else sample.reward
    return reward_number(reward, f"the reward of sample {position}{under} is")


def overlong_penalty(n_tokens: int, *, longest: int, buffer: int) -> float:
    """DAPO's soft overlong punishment, added to the reward (arXiv:2503.14476, eq. 13): 0 up to ``longest - buffer``
    sampled tokens, falling linearly to -1 at ``longest``, and -1 above."""
    return -min(1.0, max(0, n_tokens - (longest - buffer)) / buffer) if buffer else 0.0


def _advantages(rewards: list[float], *, std: bool) -> list[float]:
    if all_equal(rewards):
        return [0.0] * len(rewards)
    # Scaling by the largest magnitude keeps squares of very large or very small rewards from overflow and underflow.
    scale = max(abs(reward) for reward in rewards)
    scaled = [reward / scale for reward in rewards]
    mean = math.fsum(scaled) / len(scaled)
    deviations = [reward - mean for reward in scaled]
    if not std:
        return [deviation * scale for deviation in deviations]
    spread = math.sqrt(math.fsum(deviation * deviation for deviation in deviations) / (len(deviations) - 1))
    return [deviation / (spread + _EPS / scale) for deviation in deviations]
