"""The local trainer's batch: checked samples, flat over the tokens under the loss mask, and their division.

A *minibatch* is the input of one optimizer step: whole rollouts, evenly divided. A *microbatch* is the input of one
forward pass: samples with common prefixes, or of similar length; the division changes speed and memory only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_slime.data.credit import Credit, token_advantages
from agl_slime.data.normalize import is_counted, overlong_penalty
from agl_slime.engine.client.replay import Nucleus
from agl_slime.errors import TrainerError
from agl_slime.tokens.codec import common_prefix
from agl_slime.train.local.functions import user_advantages
from agl_slime.types import Sample, flat_samples, staleness_spans


@dataclass(frozen=True)
class TrainBatch:
    """Arrays named ``token_...`` have one entry per token under the loss mask, ``[n_tokens]``, sample by sample."""

    tokens: list[NDArray[np.int64]]
    """Prompt and response ids of each sample, ``[length]``."""
    target_positions: list[NDArray[np.int64]]
    """Indices into ``tokens`` of each sample, of the tokens under the mask; at least 1, because a prompt precedes."""
    rollout_ids: NDArray[np.int64]
    """``[n_samples]``: equal for the samples of one rollout."""
    counted: NDArray[np.bool_]
    """``[n_samples]``: whether a sample is trained; minibatches skip the others."""
    token_rewards: NDArray[np.float64]
    """The advantage of the token's sample, or of its turn if that has a reward."""
    token_rollouts: NDArray[np.int64]
    """The number of the token's rollout in the batch, from 0."""
    token_rollout_mask_sums: NDArray[np.int64]
    """Tokens under the mask in all samples of the token's rollout; slime's ``rollout_mask_sums``."""
    token_log_probs: NDArray[np.float32] | None
    """The engine's log-probs, or ``None`` when the samples have none."""
    token_teacher_log_probs: NDArray[np.float32] | None = None
    """The teacher's log-probs, or ``None`` when the samples have none."""
    experts: list[NDArray[Any]] | None = None
    """The engine's experts of each token but the last, ``[length - 1, layers, experts per token]``."""
    token_nucleus: Nucleus | None = None
    """The ids that each token was sampled from."""
    overlong_penalty: float = 0.0
    """The mean ``overlong_penalty`` of the trained rollouts, 0 or less."""

    @classmethod
    def from_samples(
        cls,
        samples: Sequence[Sample] | Sequence[Sequence[Sample]],
        *,
        rewards: str = "",
        credit: Credit = "group",
        rewards_normalization: bool = True,
        std_normalization: bool = True,
        advantage: str | None = None,
        max_response: int = 0,
        overlong_buffer: int = 0,
    ) -> TrainBatch:
        """The batch of ``samples``, flat or nested in groups. A sample without a mask is trained as a whole. A failed
        sample, or one with ``remove_sample``, is not trained, and has no part in baselines and ``n_rollouts``.
        Advantages are normalised per ``group_index`` with one reward per rollout, by the settings of the same names in
        ``LocalTrainerSettings``; each reward of a rollout has its ``overlong_penalty`` added.

        Raises:
            TrainerError: no samples, or one that cannot be trained on; the text names the sample and the field.
            RewardError: a missing or non-finite reward, or siblings that differ in reward or group.
        """
        flat = list(flat_samples(samples))
        _require(flat, "there are no samples to make a batch of; collect at least one finished rollout.")
        grouped = len(flat) == 1 or any(sample.group_index is not None for sample in flat)
        if rewards_normalization:
            _require(grouped, "no sample has a group_index to take a baseline from; set it, or rewards_normalization.")
        used = {sample.rollout_id for sample in flat}
        unused = (number for number in count() if number not in used)
        rollout_ids = [next(unused) if sample.rollout_id is None else sample.rollout_id for sample in flat]
        counted = [is_counted(sample) for sample in flat]
        fit = [i for i, counts in enumerate(counted) if counts]
        for name in ("rollout_log_probs", "teacher_log_probs"):
            without = [i for i in fit if getattr(flat[i], name, None) is None]
            if 0 < len(without) < len(fit):
                raise TrainerError(f"sample {without[0]} has no {name} while others do; give them to all or to none.")

        with_experts = _has_experts(flat)
        tokens, masks = [], []
        log_probs: dict[str, list[NDArray[Any]]] = {"rollout_log_probs": [], "teacher_log_probs": []}
        for i, sample in enumerate(flat):
            ids, length = _array(sample.tokens, f"tokens of sample {i}", np.int64), sample.response_length
            lengths = f"response_length of sample {i} is {length} with {len(ids)} tokens"
            _require(0 <= length < len(ids), f"{lengths}; the prompt needs at least one.")
            _require(ids.min() >= 0, f"tokens of sample {i} contain {ids.min()}; token ids cannot be negative.")
            images = getattr(sample, "multimodal_inputs", None) or getattr(sample, "multimodal_train_inputs", None)
            _require(images is None, f"sample {i} has images; use slime: this trainer supports text only.")
            whole = not counted[i] or sample.loss_mask is None
            mask = [int(counted[i])] * length if whole else sample.loss_mask
            mask = _array(mask, f"loss_mask of sample {i}", np.int64, length)
            _require(np.isin(mask, (0, 1)).all(), f"loss_mask of sample {i} must contain only 0 and 1.")
            tokens.append(ids)
            masks.append(mask.astype(np.bool_))
            for name, of_masked in log_probs.items():
                if (values := getattr(sample, name, None)) is not None:
                    of_masked.append(_array(values, f"{name} of sample {i}", np.float32, length)[masks[i]])

        counts = np.array([mask.sum() for mask in masks], dtype=np.int64)
        numbers = np.array(rollout_ids, dtype=np.int64)
        _, rollout_of_sample = np.unique(numbers, return_inverse=True)
        sums = np.bincount(rollout_of_sample, weights=counts).astype(np.int64)[rollout_of_sample]
        penalties = [overlong_penalty(int(n), longest=max_response, buffer=overlong_buffer) for n in sums]

        advantages = token_advantages(
            flat,
            rewards=rewards,
            credit=credit,
            normalized=rewards_normalization,
            std=std_normalization,
            advantages=user_advantages(advantage) if advantage else None,
            penalties=penalties,
        )
        targets = [len(ids) - len(mask) + np.flatnonzero(mask) for ids, mask in zip(tokens, masks, strict=True)]
        return cls(
            tokens=tokens,
            target_positions=targets,
            rollout_ids=numbers,
            counted=np.array(counted),
            token_rewards=np.concatenate([values[mask] for values, mask in zip(advantages, masks, strict=True)]),
            token_rollouts=np.repeat(rollout_of_sample, counts),
            token_rollout_mask_sums=np.repeat(sums, counts),
            token_log_probs=_concatenated(log_probs["rollout_log_probs"]),
            token_teacher_log_probs=_concatenated(log_probs["teacher_log_probs"]),
            experts=[np.asarray(sample.rollout_routed_experts) for sample in flat] if with_experts else None,
            token_nucleus=_nucleus(flat, masks),
            overlong_penalty=fmean({rollout_ids[i]: penalties[i] for i in fit}.values()) if fit else 0.0,
        )

    @property
    def n_samples(self) -> int:
        return len(self.tokens)

    @cached_property
    def n_rollouts(self) -> int:
        return len(np.unique(self.rollout_ids[self.counted]))

    @property
    def n_tokens(self) -> int:
        """Tokens under the mask in the whole batch."""
        return len(self.token_rewards)

    @cached_property
    def token_counts(self) -> NDArray[np.int64]:
        """``[n_samples]``: tokens under the mask in each sample."""
        return np.array([len(positions) for positions in self.target_positions], dtype=np.int64)

    @cached_property
    def token_offsets(self) -> NDArray[np.int64]:
        """``[n_samples + 1]``: sample ``i`` has entries ``token_offsets[i]:token_offsets[i + 1]`` of ``token_...``."""
        return np.concatenate([[0], np.cumsum(self.token_counts)])


def token_staleness(samples: Sequence[Sample], batch: TrainBatch) -> NDArray[np.int64]:
    """``[n_tokens]``: weight versions between sampling and training of each token under the mask, -1 if unknown.
    ``batch`` is of the flat ``samples``; their ``metadata`` has ``weight_spans`` of the tokens and ``policy_version``
    of the policy at delivery."""
    by_sample = []
    for sample, tokens, positions in zip(samples, batch.tokens, batch.target_positions, strict=True):
        values = np.full(len(tokens), -1, dtype=np.int64)
        prompt_length = len(tokens) - sample.response_length
        for staleness, start, end in staleness_spans(sample, (sample.metadata or {}).get("policy_version")):
            values[prompt_length + start : prompt_length + end] = staleness
        by_sample.append(values[positions])
    return np.concatenate(by_sample)


@dataclass(frozen=True)
class MicroBatch:
    """``B`` sequences of at most ``T`` ids with ``N`` tokens under the loss mask. A common prefix of sequences, such as
    the prompt of a group, is stored once: ``L`` ids in all."""

    ids: NDArray[np.int64]
    """``[L]``, without padding."""
    positions: NDArray[np.int64]
    """``[L]``: the position of each id in its sequences, from 0."""
    cells: NDArray[np.int64]
    """``[B, T]``: indices into ``ids`` of each sequence; arbitrary after its end."""
    homes: NDArray[np.int64]
    """``[L]``: for each id, a flat index into ``cells`` where it occurs."""
    sources: NDArray[np.int64]
    """``[N]``: indices into ``ids`` of the positions whose logits predict the tokens, one before each token."""
    targets: NDArray[np.int64]
    """``[N]``: the token ids."""
    token_index: NDArray[np.int64]
    """``[N]``: indices of the tokens in the batch's ``token_...`` arrays."""
    experts: NDArray[Any] | None = None
    """``[L, layers, experts per token]``, the engine's."""
    nucleus: Nucleus | None = None
    """The ids that the engine sampled each of the ``N`` tokens from."""
    has_advantage: bool = True
    """Whether any of the tokens has an advantage other than 0; without, the policy gradient is 0."""

    @classmethod
    def from_sequences(
        cls,
        sequences: Sequence[NDArray[np.int64]],
        *,
        sources: NDArray[np.int64],
        experts: Sequence[NDArray[Any]] | None = None,
        **fields: Any,
    ) -> MicroBatch:
        """The microbatch of ``sequences``. Each shares its common prefix with the sequence before it, so their order
        matters; with ``experts`` they share nothing, because the engine may have routed equal tokens differently.
        ``sources`` are indices into the concatenated ``sequences``; ``fields`` are the other fields."""
        lengths = np.array([len(ids) for ids in sequences])
        cells = np.zeros((len(sequences), int(lengths.max())), dtype=np.int64)
        width, n_ids, rows, homes = cells.shape[1], 0, [], []
        for row, ids in enumerate(sequences):
            shared = common_prefix(sequences[row - 1], ids) if row and experts is None else 0
            new = len(ids) - shared
            cells[row, :shared] = cells[row - 1, :shared]
            cells[row, shared : len(ids)] = np.arange(n_ids, n_ids + new)
            homes.append(row * width + np.arange(shared, len(ids)))
            rows.append(ids[shared:])
            n_ids += new
        homes = np.concatenate(homes)
        concatenated = np.concatenate([cells[row, :length] for row, length in enumerate(lengths)])
        layout: Any = {"ids": np.concatenate(rows), "positions": homes % width, "cells": cells, "homes": homes}
        if experts is not None:
            layout["experts"] = np.concatenate(experts)
        return cls(**layout, sources=concatenated[sources], **fields)


def split_minibatches(batch: TrainBatch, *, n_minibatches: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Sample indices per minibatch: rollouts in random order, divided so that sizes differ by at most one; siblings
    stay together.

    With fewer rollouts than ``n_minibatches`` there is one minibatch per rollout.
    """
    rollouts = np.unique(batch.rollout_ids[batch.counted])
    chunks = np.array_split(rollouts[rng.permutation(len(rollouts))], min(n_minibatches, len(rollouts)))
    return [np.flatnonzero(np.isin(batch.rollout_ids, chunk)) for chunk in chunks]


def make_microbatches(
    batch: TrainBatch, samples: Sequence[int] | NDArray[np.int64], *, max_tokens: int, sharing: bool
) -> Iterator[MicroBatch]:
    """Divide ``samples`` into microbatches of at most ``max_tokens`` ids; a longer sample is alone. Samples without an
    advantage (of a group with equal rewards) have separate microbatches.

    With ``sharing``, samples with a common prefix are together and the prefix counts once; in padded rows, as the
    attention needs them, the ids are at most twice as many. Without, samples are sorted by length, and padding counts.

    Sequences end at the last position that predicts a token under the mask. Samples without such a token are skipped.
    """
    sequences = {int(i): batch.tokens[i][: batch.target_positions[i][-1]] for i in samples if batch.token_counts[i]}
    sharing = sharing and batch.experts is None
    advantage = {i: bool(batch.token_rewards[slice(*batch.token_offsets[i : i + 2])].any()) for i in sequences}

    def place(i: int) -> tuple[Any, ...]:
        # big-endian bytes sort like the ids
        like = sequences[i].astype(">i8").tobytes() if sharing else len(sequences[i])
        return advantage[i], like, i

    bucket: list[int] = []
    n_ids = width = 0
    for i in sorted(sequences, key=place):
        length = new = len(sequences[i])
        if bucket:
            new -= common_prefix(sequences[bucket[-1]], sequences[i]) if batch.experts is None else 0
            cells = (len(bucket) + 1) * max(width, length)
            full = n_ids + new > max_tokens or cells > 2 * max_tokens if sharing else cells > max_tokens
            if full or advantage[i] != advantage[bucket[0]]:
                yield _pack(batch, bucket, sequences)
                bucket, n_ids, width, new = [], 0, 0, length
        n_ids += new
        width = max(width, length)
        bucket.append(i)
    if bucket:
        yield _pack(batch, bucket, sequences)


def _pack(batch: TrainBatch, samples: list[int], sequences: dict[int, NDArray[np.int64]]) -> MicroBatch:
    lengths = np.array([len(sequences[i]) for i in samples])
    starts = np.cumsum(lengths) - lengths
    index = np.concatenate([np.arange(*batch.token_offsets[i : i + 2]) for i in samples])
    return MicroBatch.from_sequences(
        [sequences[i] for i in samples],
        nucleus=None if batch.token_nucleus is None else batch.token_nucleus.select(index),
        experts=None if batch.experts is None else [batch.experts[i][: len(sequences[i])] for i in samples],
        sources=np.concatenate(
            [start + batch.target_positions[i] - 1 for i, start in zip(samples, starts, strict=True)]
        ),
        targets=np.concatenate([batch.tokens[i][batch.target_positions[i]] for i in samples]),
        token_index=index,
        has_advantage=bool(batch.token_rewards[index].any()),
    )


def _has_experts(samples: Sequence[Sample]) -> bool:
    """Whether the samples have routed experts: all, or none."""
    having = [getattr(sample, "rollout_routed_experts", None) is not None for sample in samples]
    if any(having) and not all(having):
        first = having.index(False)
        raise TrainerError(
            f"sample {first} has no rollout_routed_experts while others do; give them to all or to none."
        )
    for i, sample in enumerate(samples if any(having) else ()):
        shape = np.shape(sample.rollout_routed_experts)
        rows = f"rollout_routed_experts of sample {i} has shape {shape}"
        _require(len(shape) == 3 and shape[0] == len(sample.tokens) - 1, f"{rows}; it has {len(sample.tokens)} tokens.")
    return any(having)


def _nucleus(samples: Sequence[Sample], masks: Sequence[NDArray[np.bool_]]) -> Nucleus | None:
    """The nucleus of the tokens under the mask; an empty row of a token without one keeps all ids."""
    if all(getattr(sample, "rollout_top_p_token_offsets", None) is None for sample in samples):
        return None
    ids, counts = [], []
    for i, (sample, mask) in enumerate(zip(samples, masks, strict=True)):
        if sample.rollout_top_p_token_offsets is None:
            counts.append(np.zeros(int(mask.sum()), dtype=np.int64))
            continue
        sampled_from = np.asarray(sample.rollout_top_p_token_ids)
        offsets = np.asarray(sample.rollout_top_p_token_offsets)
        _require(
            len(offsets) == len(mask) + 1 and offsets[-1] == len(sampled_from),
            f"rollout_top_p_token_offsets of sample {i} has {len(offsets)} entries for {len(mask)} response tokens.",
        )
        lengths = np.diff(offsets)
        ids.append(sampled_from[np.repeat(mask, lengths)])
        counts.append(lengths[mask])
    flat = np.concatenate(ids) if ids else np.zeros(0)
    offsets = np.concatenate(([0], np.cumsum(np.concatenate(counts))))
    return Nucleus(flat.astype(np.int32), offsets.astype(np.int32))


def _concatenated(arrays: list[NDArray[Any]]) -> NDArray[Any] | None:
    return np.concatenate(arrays) if arrays else None


def _require(fits: Any, text: str) -> None:
    if not fits:
        raise TrainerError(text)


def _array(values: Any, name: str, dtype: type[np.number], length: int | None = None) -> NDArray[Any]:
    """A flat array of finite numbers; only integers become integers."""
    integers = issubclass(dtype, np.integer)
    try:
        array = np.asarray(values, dtype=None if integers else dtype)
    except (TypeError, ValueError):
        raise TrainerError(f"{name} must be numbers, got {values!r:.80}.") from None
    fits = array.ndim == 1 and not (integers and array.size and array.dtype.kind not in "iu")
    kind = "integers" if integers else "numbers"
    _require(fits, f"{name} must be a flat sequence of {kind}, got {array.dtype} of shape {array.shape}.")
    if length is not None:
        _require(len(array) == length, f"{name} has {len(array)} entries, response_length is {length}.")
    for i in np.flatnonzero(~np.isfinite(array)):
        raise TrainerError(f"{name} has {array[i]} at position {i}; only finite numbers can be trained on.")
    return array.astype(dtype)
