"""Causal attention within each sequence of a packed batch (``thd``)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch


class DotProductAttention(torch.nn.Module):
    """Takes the arguments of Transformer Engine's class; kernels are not chosen, and there is no dropout."""

    def __init__(
        self,
        *_: Any,
        softmax_scale: float | None = None,
        window_size: tuple[int, int] | None = None,
        cp_group: Any = None,
        **__: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale, self.window, self.cp_group = softmax_scale, window_size, cp_group

    def forward(self, query: Any, key: Any, value: Any, *_: Any, cu_seqlens_q: Any = None, **named: Any) -> Any:
        if named.get("qkv_format") != "thd":
            raise NotImplementedError("attention on a CPU is for packed batches: leave --qkv-format out")
        query, key, value = (tensor.squeeze(1) if tensor.dim() == 4 else tensor for tensor in (query, key, value))
        ranks, rank = (self.cp_group.size(), self.cp_group.rank()) if self.cp_group is not None else (1, 0)
        bounds = [bound // ranks for bound in cu_seqlens_q.tolist()]  # of a rank's shares
        keys, values = ([*self._of_ranks(tensor).unflatten(0, (ranks, -1))] for tensor in (key, value))
        outputs = []
        for first, last in pairwise(bounds):
            places = torch.cat([_places(last - first, peer, ranks) for peer in range(ranks)])
            k, v = (torch.cat([share[first:last] for share in shares]) for shares in (keys, values))
            ahead = _places(last - first, rank, ranks)[:, None] - places[None]
            mask = ahead >= 0
            if self.window is not None and self.window[0] >= 0:
                mask &= ahead <= self.window[0]
            heads = (tensor.transpose(0, 1)[None] for tensor in (query[first:last], k, v))
            attend = torch.nn.functional.scaled_dot_product_attention
            outputs.append(attend(*heads, attn_mask=mask, scale=self.softmax_scale, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)

    def _of_ranks(self, share: Any) -> Any:
        """The shares of all context-parallel ranks, one after another."""
        if self.cp_group is None:
            return share
        from megatron.core import tensor_parallel  # which imports this module

        return tensor_parallel.gather_from_sequence_parallel_region(share, group=self.cp_group)


def _places(length: int, rank: int, ranks: int) -> torch.Tensor:
    """The places in its sequence of a rank's tokens: the rank-th of ``2 * ranks`` chunks, and the one as far from the
    end."""
    if ranks == 1:
        return torch.arange(length)
    chunk = torch.arange(length // 2)
    return torch.cat([chunk + rank * len(chunk), chunk + (2 * ranks - 1 - rank) * len(chunk)])
