"""The default stages of the Rollout Buffer, from items to training data.

An *item* is a dict with ``uid``, ``instance_id``, ``messages``, ``reward`` and ``extra_info``; a *group* is
``(instance_id, items)``, with answers to the same prompt. Names, order and parameters follow slime's documentation of
its Rollout Buffer. Each stage is a plain function, which a generator may replace under the same name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from agl_slime.data.normalize import all_equal
from agl_slime.tokens.reward import LARGEST

Item = dict[str, Any]
Group = tuple[Any, list[Item]]

# Name of an item's delivered group; a resumed trainer sends these names back.
BUFFER_GROUP = "buffer_group"
# Set by ``pad_group_data``: the uid that a copy repeats, and the number of items that share a rollout's reward.
PADDING_OF = "padding_of"
PADDING_SHARES = "padding_shares"

# slime's convention for failed rollouts.
FAILED_REWARD = -1.0

_EPSILON = 1e-8


def get_group_data_meta_info(temp_data: Mapping[Any, Iterable[Item]]) -> dict[str, Any]:
    """Counts and mean reward of all items, valid or not. Items without a finite reward count, but not in the mean."""
    items = [item for group in temp_data.values() for item in group]
    rewards = [reward for item in items if (reward := numeric_reward(item)) is not None]
    return {
        "total_samples": len(items),
        "num_groups": len(temp_data),
        "avg_group_size": len(items) / len(temp_data) if temp_data else 0,
        "avg_reward": sum(rewards) / len(rewards) if rewards else 0,
    }


def is_valid_group(group: Group, min_valid_group_size: int, task_type: str = "") -> tuple[bool, bool]:
    """``(is_valid, is_finished)``: a group is both as soon as it has ``min_valid_group_size`` items."""
    _, items = group
    enough = len(items) >= min_valid_group_size
    return enough, enough


def filter_item(item: Item, task_type: str = "", *, reward_range: tuple[float, float] | None = None) -> bool:
    """Keep items with an instance id, a finite reward within ``reward_range`` (``None``: any but -1), and messages or
    token ids.

    This drops failed rollouts, which have a reward outside of the range (by convention -1), or an ``error`` in
    ``extra_info``.
    """
    if item.get("instance_id") is None:
        return False
    extra = item.get("extra_info")
    if isinstance(extra, Mapping) and extra.get("error"):
        return False
    if not isinstance(item.get("messages"), list) and not isinstance(item.get("tokens"), list):
        return False
    reward = numeric_reward(item)
    return reward is not None and _within(reward, reward_range)


def normalize_group_data(
    group: Group, epsilon: float = _EPSILON, *, reward_range: tuple[float, float] | None = None
) -> Group:
    """``(r - mean) / (std + epsilon)`` over the rewards within ``reward_range``; other rewards are unchanged.
    ``raw_reward`` is the reward before.

    ``std`` is the population's. Equal rewards become exactly 0. slime must not normalise again:
    ``--disable-rewards-normalization``.
    """
    instance_id, items = group
    rewards = [float(item["reward"]) for item in items]
    counted = [reward for reward in rewards if _within(reward, reward_range)]
    if not counted:
        return instance_id, [{**item, "raw_reward": item["reward"]} for item in items]
    mean = math.fsum(counted) / len(counted)
    std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in counted) / len(counted))
    flat = all_equal(counted) or std < epsilon

    def normalized(reward: float) -> float:
        if not _within(reward, reward_range):
            return reward
        return 0.0 if flat else (reward - mean) / (std + epsilon)

    return instance_id, [
        {**item, "raw_reward": item["reward"], "reward": normalized(reward)}
        for item, reward in zip(items, rewards, strict=True)
    ]


def pad_group_data(group: Group, group_size: int) -> Group:
    """The group with exactly ``group_size`` items: surplus items are cut at the end, missing ones are copies of the
    first.

    An item and its copies share its reward equally: a normalised reward is the advantage, a factor of the gradient, so
    a rollout counts once in total, even for trainers unaware of copies. ``padding_of`` of a copy is the original's
    ``uid``; ``padding_shares`` of both is the number of shares. By these ``agl_slime.buffer.agent_rollout`` masks out
    copies and restores the originals' rewards.
    """
    instance_id, items = group
    if not items:
        return instance_id, []
    originals = items[:group_size]
    share, surplus = divmod(group_size, len(originals))
    copies_of = [share + (position < surplus) for position in range(len(originals))]
    padded: list[Item] = []
    for item, shares in zip(originals, copies_of, strict=True):
        padded.append(item if shares == 1 else {**item, "reward": item["reward"] / shares, PADDING_SHARES: shares})
    for number in range(1, max(copies_of)):
        for item, copied, shares in zip(originals, list(padded), copies_of, strict=False):
            if number < shares:
                padded.append({**copied, "uid": f"{item.get('uid')}#pad{number}", PADDING_OF: item.get("uid")})
    return instance_id, padded


def _within(reward: float, reward_range: tuple[float, float] | None) -> bool:
    return reward != FAILED_REWARD if reward_range is None else reward_range[0] <= reward <= reward_range[1]


def numeric_reward(item: Mapping[str, Any]) -> float | None:
    """The item's reward if it is a finite number that a trainer can square, else ``None``."""
    reward = item.get("reward")
    return float(reward) if isinstance(reward, (int, float)) and abs(reward) <= LARGEST else None
