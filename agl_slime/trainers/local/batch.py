"""The batch that the local trainer works on: slime's batch dict, and a checked view of it.

What slime leaves unchecked (lengths of log-probs, log-probs on some samples only, NaN rewards, a response as long as
the tokens) is refused here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_slime.errors import TrainerError
from agl_slime.groups.normalize import normalize_rewards, reward_value
from agl_slime.types import Sample, flat_samples, get_rollout_id

_REQUIRED = ("tokens", "response_lengths", "rewards", "loss_masks", "rollout_ids")


def samples_to_train_data(
    samples: Sequence[Sample] | Sequence[Sequence[Sample]],
    *,
    reward_key: str | None = None,
    rewards_normalization: bool = True,
    std_normalization: bool = True,
) -> dict[str, Any]:
    """What training on text reads of the dict that slime's ``RolloutManager._convert_samples_to_train_data`` makes of
    ``samples`` (flat, or nested in groups); every value is a list with one entry per sample, and ``rewards`` are
    advantages, normalised per ``group_index`` with one reward per rollout.

    Args:
        reward_key: picks the reward where ``Sample.reward`` is a dict.
        rewards_normalization: subtract the mean of the prompt group; without it ``rewards`` are the raw ones.
        std_normalization: also divide by the standard deviation of the group; slime's ``grpo_std_normalization``.

    Raises:
        TrainerError: no samples, or a sample that cannot be trained on; the text names the sample and the field.
        RewardError: a reward that is missing or not finite, or siblings that differ in reward or group.
    """
    flat = list(flat_samples(samples))
    if not flat:
        raise TrainerError("there are no samples to make a batch of; collect at least one finished rollout.")
    rewards = raw_rewards = [reward_value(sample, position, key=reward_key) for position, sample in enumerate(flat)]
    given_ids = [get_rollout_id(sample) for sample in flat]
    if rewards_normalization:
        groups = [sample.group_index for sample in flat]
        if len(flat) > 1 and all(group is None for group in groups):
            raise TrainerError("no sample has a group_index to take a baseline from; set it, or rewards_normalization.")
        rewards = normalize_rewards(raw_rewards, group_indices=groups, rollout_ids=given_ids, std=std_normalization)
    # as slime does: samples without an id get the smallest integers that are not taken
    taken = set(given_ids)
    unused = (number for number in count() if number not in taken)
    rollout_ids = [next(unused) if given is None else given for given in given_ids]
    loss_masks = [_loss_mask(sample) for sample in flat]
    data: dict[str, Any] = {
        "tokens": [sample.tokens for sample in flat],
        "response_lengths": [sample.response_length for sample in flat],
        "rewards": rewards,
        "raw_reward": raw_rewards,
        "rollout_ids": rollout_ids,
        "loss_masks": loss_masks,
        "rollout_mask_sums": _rollout_sums(rollout_ids, [sum(mask) for mask in loss_masks]),
    }
    for name in ("rollout_log_probs", "multimodal_train_inputs"):
        values = [getattr(sample, name, None) for sample in flat]
        if any(value is not None for value in values):
            data[name] = values
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
    """The advantage of each sample."""
    rollout_ids: NDArray[np.int64]
    rollout_mask_sums: NDArray[np.int64]
    """Tokens under the mask in all samples of the sample's rollout."""
    rollout_log_probs: list[NDArray[np.float32]] | None
    """The engine's log-prob of each response token, ``[response_length]`` each, or ``None`` when the batch has none."""

    @classmethod
    def from_train_data(cls, data: Mapping[str, Any]) -> TrainBatch:
        """The view of slime's batch dict, of which other keys are left alone; ``rollout_mask_sums`` is computed where
        it is missing.

        Raises:
            TrainerError: a key is missing, lengths disagree, a number is not finite, a mask holds something other than
                0 and 1, or there are inputs other than text.
        """
        if missing := [key for key in _REQUIRED if key not in data]:
            raise TrainerError(f"the batch lacks {', '.join(missing)}, which slime's batch dict has.")
        if any(value is not None for value in data.get("multimodal_train_inputs", ())):
            raise TrainerError("the batch has multimodal_train_inputs; use slime for images: this trains on text only.")
        n_samples = len(data["tokens"])
        if n_samples == 0:
            raise TrainerError("the batch has no samples; give at least one.")
        for key in (*_REQUIRED, "rollout_mask_sums", "rollout_log_probs"):
            if key in data and len(data[key]) != n_samples:
                raise TrainerError(
                    f"{key} has {len(data[key])} entries for {n_samples} samples; it needs one for each."
                )
        tokens = [_array(ids, f"tokens of sample {i}", np.int64) for i, ids in enumerate(data["tokens"])]
        lengths = _array(data["response_lengths"], "response_lengths", np.int64)
        for i, (ids, length) in enumerate(zip(tokens, lengths, strict=True)):
            if not 0 <= length < len(ids):
                found = f"{length} with {len(ids)} tokens"
                raise TrainerError(f"response_length of sample {i} is {found}; at least one must be the prompt's.")
            if ids.min() < 0:
                raise TrainerError(f"tokens of sample {i} hold the id {ids.min()}; token ids cannot be negative.")
        masks = [_mask(mask, i, lengths[i]) for i, mask in enumerate(data["loss_masks"])]
        rollout_ids = _array(data["rollout_ids"], "rollout_ids", np.int64)
        own_sums = np.array(_rollout_sums(rollout_ids.tolist(), [int(mask.sum()) for mask in masks]), dtype=np.int64)
        # siblings may be in another rank's part of the batch, so given sums may be larger
        mask_sums = _array(data.get("rollout_mask_sums", own_sums), "rollout_mask_sums", np.int64)
        for i in np.flatnonzero(mask_sums < own_sums):
            found = f"{mask_sums[i]}, but its rollout has {own_sums[i]} tokens under the mask here"
            raise TrainerError(f"rollout_mask_sums of sample {i} is {found}.")
        return cls(
            tokens=tokens,
            response_lengths=lengths,
            loss_masks=masks,
            rewards=_array(data["rewards"], "rewards", np.float64),
            rollout_ids=rollout_ids,
            rollout_mask_sums=mask_sums,
            rollout_log_probs=_log_probs(data.get("rollout_log_probs", [None] * n_samples), lengths),
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
        """``[n_samples + 1]``: sample ``i`` has entries ``token_offsets[i]:token_offsets[i + 1]`` of ``token_...``."""
        return np.concatenate([[0], np.cumsum(self.token_counts)])

    @cached_property
    def target_positions(self) -> list[NDArray[np.int64]]:
        """Where in ``tokens`` of each sample the trained tokens are; at least 1, as a prompt comes before."""
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
        return np.concatenate([own[mask] for own, mask in zip(self.rollout_log_probs, self.loss_masks, strict=True)])


def _loss_mask(sample: Sample) -> list[int]:
    if sample.remove_sample or sample.loss_mask is None:
        return [int(not sample.remove_sample)] * sample.response_length
    return sample.loss_mask


def _rollout_sums(rollout_ids: Sequence[int], values: Sequence[int]) -> list[int]:
    """For each sample the sum of ``values`` over the samples of its rollout."""
    totals: Counter[int] = Counter()
    for rollout_id, value in zip(rollout_ids, values, strict=True):
        totals[rollout_id] += value
    return [totals[rollout_id] for rollout_id in rollout_ids]


def _log_probs(given: Sequence[Any], lengths: NDArray[np.int64]) -> list[NDArray[np.float32]] | None:
    absent = [i for i, values in enumerate(given) if values is None]
    if len(absent) == len(given):
        return None
    if absent:
        raise TrainerError(
            f"sample {absent[0]} has no rollout_log_probs while others do; all samples need them, or none."
        )
    arrays = [_array(values, f"rollout_log_probs of sample {i}", np.float32) for i, values in enumerate(given)]
    for i, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
        if len(array) != length:
            raise TrainerError(
                f"rollout_log_probs of sample {i} has {len(array)} entries, response_length is {length}."
            )
    return arrays


def _mask(values: Any, sample: int, response_length: int) -> NDArray[np.bool_]:
    array = np.asarray(values)
    if array.shape != (response_length,):
        raise TrainerError(
            f"loss_mask of sample {sample} has {array.size} entries, response_length is {response_length}."
        )
    if not np.isin(array, (0, 1)).all():
        raise TrainerError(f"loss_mask of sample {sample} must hold only 0 and 1.")
    return array.astype(np.bool_)


def _array(values: Any, name: str, dtype: type[np.number]) -> NDArray[Any]:
    """A flat array of finite numbers; integers are not made of anything else."""
    integers = issubclass(dtype, np.integer)
    try:
        array = np.asarray(values, dtype=None if integers else dtype)
    except (TypeError, ValueError):
        raise TrainerError(f"{name} must be numbers, got {values!r:.80}.") from None
    if array.ndim != 1 or (integers and array.size and array.dtype.kind not in "iu"):
        kind = "integers" if integers else "numbers"
        raise TrainerError(f"{name} must be a flat sequence of {kind}, got {array.dtype} of shape {array.shape}.")
    for i in np.flatnonzero(~np.isfinite(array)):
        raise TrainerError(f"{name} holds {array[i]} at position {i}; only finite numbers can be trained on.")
    return array.astype(dtype)
