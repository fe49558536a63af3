"""The gated delta rule, by transformers' own function for a CPU."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule


def chunk_gated_delta_rule(*tensors: Any, cu_seqlens: Any = None, g: Any, beta: Any, **named: Any) -> Any:
    """Each sequence of a packed batch by itself."""
    places = pairwise(cu_seqlens.tolist() if cu_seqlens is not None else (0, g.shape[1]))
    outputs = []
    for first, last in places:
        parts = (tensor[:, first:last] for tensor in (*tensors, g, beta))
        query, key, value, decay, rate = parts
        outputs.append(torch_chunk_gated_delta_rule(query, key, value, g=decay, beta=rate, **named)[0])
    return torch.cat(outputs, 1), None
