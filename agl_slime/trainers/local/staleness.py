"""How old the weights were that sampled each token of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agl_slime.trainers.local.batch import TrainBatch
from agl_slime.types import Sample, staleness_spans


def token_staleness(samples: Sequence[Sample], batch: TrainBatch) -> NDArray[np.int64]:
    """``[n_tokens]``: versions between the weights that sampled a token under the mask and those that train on it, -1
    where that is not known. ``batch`` was made of ``samples``, flat; their ``metadata`` says the versions:
    ``weight_spans`` of the tokens, ``policy_version`` of the policy that they were delivered to."""
    found = []
    for sample, tokens, positions in zip(samples, batch.tokens, batch.target_positions, strict=True):
        own = np.full(len(tokens), -1, dtype=np.int64)
        prompt_length = len(tokens) - sample.response_length
        for staleness, start, end in staleness_spans(sample, (sample.metadata or {}).get("policy_version")):
            own[prompt_length + start : prompt_length + end] = staleness
        found.append(own[positions])
    return np.concatenate(found)
