"""The batch dict between rollouts and training, in slime's shape, and a checked view of it.

``samples_to_train_data`` makes the dict that slime's ``RolloutManager._convert_samples_to_train_data`` makes (v0.3.1),
with two differences that matter for training: rewards are normalised by ``group_index`` with one reward per rollout
(see :mod:`agl_slime.groups.normalize`), and what slime leaves unchecked (log-prob lengths, log-probs on some samples
only, NaN rewards, a response as long as the tokens) is refused.

``TrainBatch`` is the view that a trainer works on: numpy arrays, one entry per sample, and flat arrays over the tokens
under the loss mask.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_slime.errors import TrainerError
from agl_slime.groups.normalize import normalize_rewards
from agl_slime.types import Sample, get_rollout_id

# Fields that slime passes through when the samples carry them: key in the batch dict, field of the sample.
_PASSED_THROUGH = {
    "rollout_log_probs": "rollout_log_probs",
    "rollout_top_p_token_ids": "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets": "rollout_top_p_token_offsets",
    "rollout_routed_experts": "rollout_routed_experts",
    "metadata": "train_metadata",
    "teacher_log_probs": "teacher_log_probs",
}


def samples_to_train_data(
    samples: Sequence[Sample] | Sequence[Sequence[Sample]],
    *,
    reward_key: str | None = None,
    rewards_normalization: bool = True,
    std_normalization: bool = True,
) -> dict[str, Any]:
    """The batch dict of slime for ``samples`` (flat, or nested in groups), every value a list with one entry per
    sample.

    Keys: ``tokens`` (prompt + response ids), ``response_lengths``, ``rewards`` (advantages when
    ``rewards_normalization``, else the raw rewards), ``raw_reward`` (``metadata["raw_reward"]`` where given),
    ``truncated`` (0/1), ``sample_indices``, ``rollout_ids`` (unused small integers for samples that have none),
    ``loss_masks`` (all ones where the sample has none, all zeros for ``remove_sample``), ``rollout_mask_sums`` (tokens
    under the mask in all samples of the rollout) and ``source_names`` (``metadata["source_name"]``). When the samples
    carry them also ``rollout_log_probs``, ``round_number``, ``metadata``, ``multimodal_train_inputs``,
    ``teacher_log_probs``, ``rollout_top_p_token_ids``, ``rollout_top_p_token_offsets`` and ``rollout_routed_experts``.
    The samples are not changed.

    Args:
        reward_key: picks the reward where ``Sample.reward`` is a dict.
        rewards_normalization: subtract the mean of the prompt group (``group_index``).
        std_normalization: also divide by the standard deviation of the group; slime's ``grpo_std_normalization``.

    Raises:
        TrainerError: no samples, or a sample that cannot be trained on; the text names the sample and the field.
        RewardError: a NaN or infinite reward, or siblings that differ in reward or group.
    """
    flat = list(_flatten(samples))
    if not flat:
        raise TrainerError("there are no samples to make a batch of; collect at least one finished rollout.")
    raw_rewards = [_reward(sample, position, reward_key) for position, sample in enumerate(flat)]
    given_ids = [get_rollout_id(sample) for sample in flat]
    rewards = raw_rewards
    if rewards_normalization:
        groups = [sample.group_index for sample in flat]
        if len(flat) > 1 and all(group is None for group in groups):
            raise TrainerError(
                "no sample has a group_index, so there is no group to take a baseline from; set it, or pass rewards_normalization=False."
            )
        rewards = normalize_rewards(raw_rewards, group_indices=groups, rollout_ids=given_ids, std=std_normalization)
    rollout_ids = _fill_rollout_ids(given_ids)
    loss_masks = [_loss_mask(sample) for sample in flat]

    data: dict[str, Any] = {
        "tokens": [sample.tokens for sample in flat],
        "response_lengths": [sample.response_length for sample in flat],
        "rewards": rewards,
        "raw_reward": raw_rewards,
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in flat],
        "sample_indices": [sample.index for sample in flat],
        "rollout_ids": rollout_ids,
        "loss_masks": loss_masks,
        "rollout_mask_sums": _rollout_mask_sums(rollout_ids, [sum(mask) for mask in loss_masks]),
        "source_names": [_source_name(sample) for sample in flat],
    }
    if any("raw_reward" in (sample.metadata or {}) for sample in flat):
        data["raw_reward"] = [(sample.metadata or {}).get("raw_reward", sample.reward) for sample in flat]
    if _on_all_or_none("metadata['round_number']", ["round_number" in (sample.metadata or {}) for sample in flat]):
        data["round_number"] = [sample.metadata["round_number"] for sample in flat]
    if any(sample.multimodal_train_inputs is not None for sample in flat):
        data["multimodal_train_inputs"] = [sample.multimodal_train_inputs for sample in flat]
    for key, name in _PASSED_THROUGH.items():
        values = [getattr(sample, name, None) for sample in flat]
        if _on_all_or_none(name, [value is not None for value in values]):
            data[key] = values
    TrainBatch.from_train_data(data)
    return data


@dataclass(frozen=True)
class TrainBatch:
    """A checked batch. Lists and per-sample arrays have ``n_samples`` entries; arrays named ``token_...`` have one
    entry per token under the loss mask."""

    tokens: list[NDArray[np.int64]]
    """Prompt and response ids of each sample, ``[length]``."""
    response_lengths: NDArray[np.int64]
    loss_masks: list[NDArray[np.bool_]]
    """``[response_length]`` each: true where a token is trained."""
    rewards: NDArray[np.float64]
    """The advantage of each sample, as the batch dict's ``rewards`` gives it."""
    rollout_ids: NDArray[np.int64]
    rollout_mask_sums: NDArray[np.int64]
    """Tokens under the mask in all samples of the sample's rollout."""
    rollout_log_probs: list[NDArray[np.float32]] | None
    """The engine's log-prob of each response token, ``[response_length]`` each, or ``None`` when the batch has none."""

    @classmethod
    def from_train_data(cls, data: Mapping[str, Any]) -> TrainBatch:
        """The view of a batch dict; ``rollout_mask_sums`` is computed where the dict lacks it.

        Raises:
            TrainerError: a key is missing, lengths disagree, a number is not finite, or a mask holds something other
                than 0 and 1.
        """
        missing = [
            key for key in ("tokens", "response_lengths", "rewards", "loss_masks", "rollout_ids") if key not in data
        ]
        if missing:
            raise TrainerError(
                f"the batch lacks {', '.join(missing)}; it needs the keys that slime's _convert_samples_to_train_data makes."
            )
        count = len(data["tokens"])
        if count == 0:
            raise TrainerError("the batch has no samples; give at least one.")
        for key in (
            "response_lengths",
            "rewards",
            "loss_masks",
            "rollout_ids",
            "rollout_mask_sums",
            "rollout_log_probs",
        ):
            if key in data and len(data[key]) != count:
                raise TrainerError(
                    f"{key} has {len(data[key])} entries for {count} samples; each key needs one entry per sample."
                )

        tokens = [_integers(ids, f"tokens of sample {i}") for i, ids in enumerate(data["tokens"])]
        response_lengths = _integers(data["response_lengths"], "response_lengths")
        loss_masks = []
        for i, (ids, response_length, mask) in enumerate(
            zip(tokens, response_lengths, data["loss_masks"], strict=True)
        ):
            if not 0 <= response_length < len(ids):
                found = f"{response_length} with {len(ids)} tokens"
                raise TrainerError(
                    f"response_length of sample {i} is {found}; it must be at least 0 and leave at least one prompt token."
                )
            if ids.min() < 0:
                raise TrainerError(f"tokens of sample {i} hold the id {ids.min()}; token ids cannot be negative.")
            loss_masks.append(_mask(mask, i, int(response_length)))

        rewards = _floats(data["rewards"], "rewards", np.float64)
        _require_finite(rewards, "rewards")
        rollout_ids = _integers(data["rollout_ids"], "rollout_ids")
        mask_sums = np.array([mask.sum() for mask in loss_masks], dtype=np.int64)
        own_sums = np.array(_rollout_mask_sums(rollout_ids.tolist(), mask_sums.tolist()), dtype=np.int64)
        rollout_mask_sums = own_sums
        if (
            "rollout_mask_sums" in data
        ):  # siblings may be in another rank's part of the batch, so the given sums may be larger
            rollout_mask_sums = _integers(data["rollout_mask_sums"], "rollout_mask_sums")
            for i in np.flatnonzero(rollout_mask_sums < own_sums):
                found = f"{rollout_mask_sums[i]}, but its rollout has {own_sums[i]} tokens under the mask here"
                raise TrainerError(f"rollout_mask_sums of sample {i} is {found}.")

        log_probs = None
        if "rollout_log_probs" in data and _on_all_or_none(
            "rollout_log_probs", [values is not None for values in data["rollout_log_probs"]]
        ):
            log_probs = []
            for i, values in enumerate(data["rollout_log_probs"]):
                array = _floats(values, f"rollout_log_probs of sample {i}", np.float32)
                if len(array) != response_lengths[i]:
                    raise TrainerError(
                        f"rollout_log_probs of sample {i} has {len(array)} entries for a response_length of {response_lengths[i]}."
                    )
                _require_finite(array, f"rollout_log_probs of sample {i}")
                log_probs.append(array)
        return cls(
            tokens=tokens,
            response_lengths=response_lengths,
            loss_masks=loss_masks,
            rewards=rewards,
            rollout_ids=rollout_ids,
            rollout_mask_sums=rollout_mask_sums,
            rollout_log_probs=log_probs,
        )

    @property
    def n_samples(self) -> int:
        return len(self.tokens)

    @cached_property
    def n_rollouts(self) -> int:
        return len(np.unique(self.rollout_ids))

    @cached_property
    def token_counts(self) -> NDArray[np.int64]:
        """``[n_samples]``: tokens under the mask in each sample."""
        return np.array([mask.sum() for mask in self.loss_masks], dtype=np.int64)

    @property
    def n_tokens(self) -> int:
        """Tokens under the mask in the whole batch."""
        return int(self.token_counts.sum())

    @cached_property
    def token_offsets(self) -> NDArray[np.int64]:
        """``[n_samples + 1]``: the tokens of sample ``i`` are entries ``token_offsets[i]:token_offsets[i + 1]`` of the
        ``token_...`` arrays."""
        return np.concatenate([[0], np.cumsum(self.token_counts)])

    @cached_property
    def target_positions(self) -> list[NDArray[np.int64]]:
        """Where in ``tokens`` of each sample the trained tokens are; at least 1, since a response never starts a
        sequence."""
        return [
            len(ids) - length + np.flatnonzero(mask)
            for ids, length, mask in zip(self.tokens, self.response_lengths, self.loss_masks, strict=True)
        ]

    @cached_property
    def token_rewards(self) -> NDArray[np.float64]:
        return np.repeat(self.rewards, self.token_counts)

    @cached_property
    def token_rollout_mask_sums(self) -> NDArray[np.int64]:
        return np.repeat(self.rollout_mask_sums, self.token_counts)

    @cached_property
    def token_log_probs(self) -> NDArray[np.float32] | None:
        """The engine's log-prob of each token under the mask."""
        if self.rollout_log_probs is None:
            return None
        return np.concatenate(
            [values[mask] for values, mask in zip(self.rollout_log_probs, self.loss_masks, strict=True)]
        )


# -- samples to dict -------------------------------------------------------------------------------------------------


def _flatten(samples: Iterable[Any]) -> Iterator[Sample]:
    for item in samples:
        if isinstance(item, list | tuple):
            yield from _flatten(item)
        else:
            yield item


def _reward(sample: Sample, position: int, reward_key: str | None) -> float:
    reward: Any = sample.reward
    if isinstance(reward, Mapping):
        if reward_key is None or reward_key not in reward:
            raise TrainerError(
                f"the reward of sample {position} is a dict with keys {list(reward)}; set reward_key to one of them (it is {reward_key!r})."
            )
        reward = reward[reward_key]
    if isinstance(reward, bool | int | float | np.number):
        return float(reward)
    raise TrainerError(f"the reward of sample {position} is {reward!r}; training needs a number.")


def _fill_rollout_ids(given: Sequence[int | None]) -> list[int]:
    """As slime does: samples without an id get the smallest integers that are not taken."""
    taken = {rollout_id for rollout_id in given if rollout_id is not None}
    filled, candidate = [], 0
    for rollout_id in given:
        if rollout_id is None:
            while candidate in taken:
                candidate += 1
            rollout_id = candidate
            taken.add(candidate)
        filled.append(rollout_id)
    return filled


def _loss_mask(sample: Sample) -> list[int]:
    if sample.remove_sample:
        return [0] * sample.response_length
    return [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask


def _rollout_mask_sums(rollout_ids: Sequence[int], mask_sums: Sequence[int]) -> list[int]:
    totals: Counter[int] = Counter()
    for rollout_id, mask_sum in zip(rollout_ids, mask_sums, strict=True):
        totals[rollout_id] += mask_sum
    return [totals[rollout_id] for rollout_id in rollout_ids]


def _source_name(sample: Sample) -> str:
    return getattr(sample, "source", None) or (sample.metadata or {}).get("source_name") or "unknown"


def _on_all_or_none(name: str, present: Sequence[bool]) -> bool:
    if any(present) and not all(present):
        raise TrainerError(
            f"sample {present.index(False)} has no {name} while others do ({sum(present)} of {len(present)}); set it on all samples or on none."
        )
    return all(present)


# -- checks ----------------------------------------------------------------------------------------------------------


def _integers(values: Any, name: str) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TrainerError(f"{name} must be a flat sequence of integers, got {array.dtype} of shape {array.shape}.")
    return array.astype(np.int64)


def _floats(values: Any, name: str, dtype: type) -> NDArray[Any]:
    try:
        array = np.asarray(values, dtype=dtype)
    except (TypeError, ValueError):
        raise TrainerError(f"{name} must be numbers, got {values!r:.80}.") from None
    if array.ndim != 1:
        raise TrainerError(f"{name} must be a flat sequence of numbers, got shape {array.shape}.")
    return array


def _require_finite(array: NDArray[Any], name: str) -> None:
    for i in np.flatnonzero(~np.isfinite(array)):
        raise TrainerError(f"{name} holds {array[i]} at position {i}; only finite numbers can be trained on.")


def _mask(mask: Any, sample: int, response_length: int) -> NDArray[np.bool_]:
    array = np.asarray(mask)
    if array.ndim != 1 or len(array) != response_length:
        raise TrainerError(
            f"loss_mask of sample {sample} has {math.prod(array.shape)} entries for a response_length of {response_length}."
        )
    if not np.isin(array, (0, 1)).all():
        raise TrainerError(f"loss_mask of sample {sample} must hold only 0 and 1.")
    return array.astype(np.bool_)


__all__ = ["TrainBatch", "samples_to_train_data"]
