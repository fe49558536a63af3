"""The five stages through which items of a rollout buffer pass on their way to training, in their default form.

An *item* is a dict with ``uid``, ``instance_id``, ``messages``, ``reward`` and ``extra_info``; a *group* is
``(instance_id, items)``, the items being answers to the same prompt. Names, order and parameters are those that slime
documents for its Rollout Buffer. Each stage is a plain function of its arguments, and a generator may bring its own
under the same name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from agl_slime.groups.normalize import all_equal

Item = dict[str, Any]
Group = tuple[Any, list[Item]]

# Names the group that an item was delivered with; a trainer gives these names back when it resumes.
BUFFER_GROUP = "buffer_group"
# Written by ``pad_group_data``: which item a copy repeats, and among how many equal items the reward of one rollout is
# shared.
PADDING_OF = "padding_of"
PADDING_SHARES = "padding_shares"

# The reward of a rollout that failed, by slime's custom.
FAILED_REWARD = -1.0

_EPSILON = 1e-8


def get_group_data_meta_info(temp_data: Mapping[Any, Iterable[Item]]) -> dict[str, Any]:
    """Counts and the mean reward of all items, fit for training or not, by group. Rewards that are no finite numbers
    count as items but not in the mean."""
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
    """Keep items that have an instance id, a finite reward within ``reward_range`` (``None``: any but -1), and messages
    or token ids.

    Failed rollouts end here: they are written with a reward outside of the range, -1 by custom, or with an ``error`` in
    their ``extra_info``.
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
    """``(r - mean) / (std + epsilon)`` over the rewards within ``reward_range``; others stay as they are.
    ``raw_reward`` keeps what was there.

    ``std`` is the population's. A group whose rewards are all equal becomes exactly 0. slime must then not normalise
    again: ``--disable-rewards-normalization``.
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
    """The group with exactly ``group_size`` items: surplus ones are dropped from the end, missing ones filled up with
    copies of the first.

    An item and its copies share its reward in equal parts: normalised it is the advantage, the factor of the gradient,
    so a rollout counts once in full, whether the trainer knows about copies or not. Copies are marked: ``padding_of``
    names the ``uid`` of the original, ``padding_shares`` on both says into how many parts the reward was divided. By
    these ``agl_slime.buffer.agent_rollout`` masks copies out and gives originals their whole reward back.
    """
    instance_id, items = group
    if not items:
        return instance_id, []
    kept = items[:group_size]
    copies_of = [group_size // len(kept) + (position < group_size % len(kept)) for position in range(len(kept))]
    padded: list[Item] = []
    for item, shares in zip(kept, copies_of, strict=True):
        padded.append(item if shares == 1 else {**item, "reward": item["reward"] / shares, PADDING_SHARES: shares})
    for number in range(1, max(copies_of)):
        for item, original, shares in zip(kept, list(padded), copies_of, strict=False):
            if number < shares:
                padded.append({**original, "uid": f"{item.get('uid')}#pad{number}", PADDING_OF: item.get("uid")})
    return instance_id, padded


def _within(reward: float, reward_range: tuple[float, float] | None) -> bool:
    return reward != FAILED_REWARD if reward_range is None else reward_range[0] <= reward <= reward_range[1]


def numeric_reward(item: Mapping[str, Any]) -> float | None:
    """The item's reward when it is a finite number, else ``None``."""
    reward = item.get("reward")
    return float(reward) if isinstance(reward, (int, float)) and math.isfinite(reward) else None
