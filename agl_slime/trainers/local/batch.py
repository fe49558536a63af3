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
    ``samples`` (flat, or nested in groups), not checked yet; every value is a list with one entry per sample, and
    ``rewards`` are advantages, normalised per ``group_index`` with one reward per rollout.

    Args:
        reward_key: picks the reward where ``Sample.reward`` is a dict.
        rewards_normalization: subtract the mean of the prompt group; without it ``rewards`` are the raw ones.
        std_normalization: also divide by the standard deviation of the group; slime's ``grpo_std_normalization``.

    Raises:
        TrainerError: no samples, or none that has a group.
        RewardError: a reward that is missing or not finite, or siblings that differ in reward or group.
    """
    flat = list(flat_samples(samples))
    _require(flat, "there are no samples to make a batch of; collect at least one finished rollout.")
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
    return data


@dataclass(frozen=True)
class TrainBatch:
    """A checked batch. Arrays named ``token_...`` have one entry per token under the loss mask, ``[n_tokens]``, sample
    by sample."""

    tokens: list[NDArray[np.int64]]
    """Prompt and response ids of each sample, ``[length]``."""
    target_positions: list[NDArray[np.int64]]
    """Where in ``tokens`` of each sample the tokens under the mask are; at least 1, as a prompt comes before."""
    rollout_ids: NDArray[np.int64]
    """``[n_samples]``: the same for the samples that one rollout became."""
    token_rewards: NDArray[np.float64]
    """The advantage of the token's sample."""
    token_rollout_mask_sums: NDArray[np.int64]
    """Tokens under the mask in all samples of the token's rollout."""
    token_log_probs: NDArray[np.float32] | None
    """The engine's log-probs, or ``None`` when the batch has none."""

    @classmethod
    def from_train_data(cls, data: Mapping[str, Any]) -> TrainBatch:
        """The view of slime's batch dict, of which other keys are left alone; ``rollout_mask_sums`` is computed where
        it is missing.

        Raises:
            TrainerError: a key is missing, lengths disagree, a number is not finite, a mask holds something other than
                0 and 1, or there are inputs other than text.
        """
        missing = [key for key in _REQUIRED if key not in data]
        _require(not missing, f"the batch lacks {', '.join(missing)}, which slime's batch dict has.")
        images = any(value is not None for value in data.get("multimodal_train_inputs", ()))
        _require(not images, "the batch has multimodal_train_inputs; use slime for images: this trains on text only.")
        n = len(data["tokens"])
        _require(n > 0, "the batch has no samples; give at least one.")
        for key in (*_REQUIRED, "rollout_mask_sums", "rollout_log_probs"):
            found = len(data.get(key, data["tokens"]))
            _require(found == n, f"{key} has {found} entries for {n} samples; it needs one for each.")
        with_log_probs = [values is not None for values in data.get("rollout_log_probs", [None] * n)]
        if any(with_log_probs) and not all(with_log_probs):
            first = with_log_probs.index(False)
            raise TrainerError(f"sample {first} has no rollout_log_probs while others do; give them to all or to none.")

        lengths = _array(data["response_lengths"], "response_lengths", np.int64)
        tokens, masks, log_probs = [], [], []
        for i, length in enumerate(lengths):
            ids = _array(data["tokens"][i], f"tokens of sample {i}", np.int64)
            fits = 0 <= length < len(ids)
            _require(
                fits, f"response_length of sample {i} is {length} with {len(ids)} tokens; leave one to the prompt."
            )
            _require(ids.min() >= 0, f"tokens of sample {i} hold the id {ids.min()}; token ids cannot be negative.")
            tokens.append(ids)
            mask = _array(data["loss_masks"][i], f"loss_mask of sample {i}", np.int64)
            found = f"{len(mask)} entries, response_length is {length}"
            _require(len(mask) == length, f"loss_mask of sample {i} has {found}.")
            _require(np.isin(mask, (0, 1)).all(), f"loss_mask of sample {i} must hold only 0 and 1.")
            masks.append(mask.astype(np.bool_))
            if with_log_probs[i]:
                own = _array(data["rollout_log_probs"][i], f"rollout_log_probs of sample {i}", np.float32)
                found = f"{len(own)} entries, response_length is {length}"
                _require(len(own) == length, f"rollout_log_probs of sample {i} has {found}.")
                log_probs.append(own[masks[i]])

        rollout_ids = _array(data["rollout_ids"], "rollout_ids", np.int64)
        own_sums = np.array(_rollout_sums(rollout_ids.tolist(), [int(mask.sum()) for mask in masks]), dtype=np.int64)
        # siblings may be in another rank's part of the batch, so given sums may be larger
        sums = _array(data.get("rollout_mask_sums", own_sums), "rollout_mask_sums", np.int64)
        for i in np.flatnonzero(sums < own_sums):
            raise TrainerError(f"rollout_mask_sums of sample {i} is {sums[i]}; its rollout has {own_sums[i]} here.")
        counts = [mask.sum() for mask in masks]
        positions = [len(ids) - len(mask) + np.flatnonzero(mask) for ids, mask in zip(tokens, masks, strict=True)]
        return cls(
            tokens=tokens,
            target_positions=positions,
            rollout_ids=rollout_ids,
            token_rewards=np.repeat(_array(data["rewards"], "rewards", np.float64), counts),
            token_rollout_mask_sums=np.repeat(sums, counts),
            token_log_probs=np.concatenate(log_probs) if log_probs else None,
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
        return np.array([len(positions) for positions in self.target_positions], dtype=np.int64)

    @property
    def n_tokens(self) -> int:
        """Tokens under the mask in the whole batch."""
        return len(self.token_rewards)

    @cached_property
    def token_offsets(self) -> NDArray[np.int64]:
        """``[n_samples + 1]``: sample ``i`` has entries ``token_offsets[i]:token_offsets[i + 1]`` of ``token_...``."""
        return np.concatenate([[0], np.cumsum(self.token_counts)])


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


def _require(fits: Any, text: str) -> None:
    if not fits:
        raise TrainerError(text)


def _array(values: Any, name: str, dtype: type[np.number]) -> NDArray[Any]:
    """A flat array of finite numbers; integers are not made of anything else."""
    integers = issubclass(dtype, np.integer)
    try:
        array = np.asarray(values, dtype=None if integers else dtype)
    except (TypeError, ValueError):
        raise TrainerError(f"{name} must be numbers, got {values!r:.80}.") from None
    kind = "integers" if integers else "numbers"
    found = f"{array.dtype} of shape {array.shape}"
    fits = array.ndim == 1 and not (integers and array.size and array.dtype.kind not in "iu")
    _require(fits, f"{name} must be a flat sequence of {kind}, got {found}.")
    for i in np.flatnonzero(~np.isfinite(array)):
        raise TrainerError(f"{name} holds {array[i]} at position {i}; only finite numbers can be trained on.")
    return array.astype(dtype)
