"""Reward normalisation per prompt group, one reward per rollout.

The group-relative baseline of GRPO (DeepSeekMath, arXiv:2402.03300, section 4.1): a rollout's advantage is its reward
minus the mean reward of the rollouts of the same prompt, divided by their standard deviation. slime finds the groups by
position in the batch, which goes wrong as soon as a rollout becomes several samples or a group is not full; here they
are found by ``group_index``, and the samples that one rollout was split into count as the one reward that they share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from agl_slime.errors import RewardError

_Key = tuple[str, int]  # ("id", a given id) or ("alone", the position of a sample that has none)


def normalize_rewards(
    rewards: Sequence[float],
    *,
    group_indices: Sequence[int | None],
    rollout_ids: Sequence[int | None],
    std: bool = True,
    eps: float = 1e-6,
) -> list[float]:
    """The advantage of each sample: ``(r - mean) / (std + eps)`` over the rollouts of its group, or ``r - mean``
    without ``std``.

    The three sequences run parallel, one entry per sample; the result has the same length. ``std`` is the unbiased
    estimate (``n - 1``) and ``eps`` 1e-6, as in slime. Sums are exactly rounded, so the order of the samples does not
    change a single bit of the result.

    - Samples with the same ``rollout_id`` are siblings: they count once and get the same advantage.
    - A sample without ``rollout_id`` is a rollout of its own.
    - A rollout without ``group_index`` is a group of its own: nothing is known to compare it with.
    - A group of one rollout, or one whose rewards are all equal, gets exactly 0.

    Raises:
        RewardError: a reward is NaN or infinite, siblings differ in reward or in group, or the sequences differ in
            length.
    """
    if not len(rewards) == len(group_indices) == len(rollout_ids):
        lengths = f"{len(rewards)}, {len(group_indices)} and {len(rollout_ids)}"
        raise RewardError(
            f"rewards, group_indices and rollout_ids must have one entry per sample, got lengths {lengths}."
        )
    rollout_keys = [_key(rollout_id, position) for position, rollout_id in enumerate(rollout_ids)]
    reward_of: dict[_Key, float] = {}
    group_of: dict[_Key, int | None] = {}
    for position, (key, reward, group) in enumerate(zip(rollout_keys, rewards, group_indices, strict=True)):
        if not math.isfinite(reward):
            raise RewardError(f"the reward of sample {position} is {reward}; rewards must be finite numbers.")
        if key not in reward_of:
            reward_of[key], group_of[key] = float(reward), group
        elif reward_of[key] != reward:
            found = f"{reward_of[key]} and {reward}"
            raise RewardError(
                f"the samples of rollout {key[1]} carry different rewards, {found}; siblings share the one reward of their rollout."
            )
        elif group_of[key] != group:
            found = f"{group_of[key]} and {group}"
            raise RewardError(
                f"the samples of rollout {key[1]} are in different groups, {found}; siblings share the group of their rollout."
            )

    members: dict[_Key, list[_Key]] = {}
    for position, (key, group) in enumerate(group_of.items()):
        members.setdefault(_key(group, position), []).append(key)
    advantage_of: dict[_Key, float] = {}
    for rollouts in members.values():
        advantages = _normalize_group([reward_of[key] for key in rollouts], std=std, eps=eps)
        advantage_of.update(zip(rollouts, advantages, strict=True))
    return [advantage_of[key] for key in rollout_keys]


def _key(given: int | None, position: int) -> _Key:
    return ("alone", position) if given is None else ("id", given)


def _normalize_group(rewards: list[float], *, std: bool, eps: float) -> list[float]:
    if min(rewards) == max(rewards):  # a rounded mean of equal numbers need not be that number
        return [0.0] * len(rewards)
    # Scaled by the largest magnitude, so that squares of very large or very small rewards neither overflow nor vanish.
    scale = max(abs(reward) for reward in rewards)
    scaled = [reward / scale for reward in rewards]
    mean = math.fsum(scaled) / len(scaled)
    deviations = [reward - mean for reward in scaled]
    if not std:
        return [deviation * scale for deviation in deviations]
    spread = math.sqrt(math.fsum(deviation * deviation for deviation in deviations) / (len(deviations) - 1))
    return [deviation / (spread + eps / scale) for deviation in deviations]


__all__ = ["normalize_rewards"]
