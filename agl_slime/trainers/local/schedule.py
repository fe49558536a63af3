"""Which samples go through the model together.

A *minibatch* is what one optimizer step sees: whole rollouts, evenly divided. A *microbatch* is what one forward pass
sees: samples of similar length, padded to the longest. How a minibatch is cut into microbatches changes speed and
memory only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agl_slime.trainers.local.batch import TrainBatch


@dataclass(frozen=True)
class MicroBatch:
    """``B`` sequences padded on the right to ``T`` ids, and the ``N`` tokens under the loss mask in them."""

    input_ids: NDArray[np.int64]
    """``[B, T]``. With causal attention nothing attends to padding on the right, so no attention mask is needed."""
    rows: NDArray[np.int64]
    """``[N]``: the sequence of each token."""
    columns: NDArray[np.int64]
    """``[N]``: the position whose logits predict the token, one before the token itself."""
    targets: NDArray[np.int64]
    """``[N]``: the token ids."""
    token_index: NDArray[np.int64]
    """``[N]``: where the tokens are in the batch's ``token_...`` arrays."""


def split_minibatches(batch: TrainBatch, *, n_minibatches: int, rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """Sample positions per minibatch: rollouts in random order, divided so that sizes differ by one at most; siblings
    stay together.

    With fewer rollouts than ``n_minibatches`` there is one minibatch per rollout.
    """
    rollouts, rollout_of_sample = np.unique(batch.rollout_ids, return_inverse=True)
    order = rng.permutation(len(rollouts))
    chunks = np.array_split(order, min(n_minibatches, len(rollouts)))
    return [np.flatnonzero(np.isin(rollout_of_sample, chunk)) for chunk in chunks]


def make_microbatches(
    batch: TrainBatch, samples: Sequence[int] | NDArray[np.int64], *, max_tokens: int
) -> Iterator[MicroBatch]:
    """Cut ``samples`` into microbatches of at most ``max_tokens`` padded ids, sorted by length; a longer sample goes
    alone.

    Sequences end where nothing after is needed: at the last position that predicts a token under the mask. Samples
    without such a token are left out.
    """
    lengths = {int(i): int(batch.target_positions[i][-1]) for i in samples if batch.token_counts[i]}
    bucket: list[int] = []
    for i in sorted(lengths, key=lambda i: (lengths[i], i)):
        if bucket and (len(bucket) + 1) * lengths[i] > max_tokens:
            yield _pad(batch, bucket, width=lengths[bucket[-1]])
            bucket = []
        bucket.append(i)
    if bucket:
        yield _pad(batch, bucket, width=lengths[bucket[-1]])


def _pad(batch: TrainBatch, samples: list[int], *, width: int) -> MicroBatch:
    input_ids = np.zeros((len(samples), width), dtype=np.int64)
    for row, i in enumerate(samples):
        ids = batch.tokens[i][: batch.target_positions[i][-1]]
        input_ids[row, : len(ids)] = ids
    positions = np.concatenate([batch.target_positions[i] for i in samples])
    return MicroBatch(
        input_ids=input_ids,
        rows=np.repeat(np.arange(len(samples)), batch.token_counts[samples]),
        columns=positions - 1,
        targets=np.concatenate([batch.tokens[i][batch.target_positions[i]] for i in samples]),
        token_index=np.concatenate([np.arange(batch.token_offsets[i], batch.token_offsets[i + 1]) for i in samples]),
    )
