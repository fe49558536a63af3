"""Attention of flat lists of tokens to rows of KV cache, for transformers' models: ``Step`` and ``InvariantStep``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

ATTENTION = "agl_slime_slots"
_BLOCK = 8
BUCKET = 64  # places that a token attends to at least, in a pass that does not depend on other tokens
ROWS = 8
"""Products of matrices are padded to a multiple of this many rows. In MKL's strict mode, which ``server.load_server``
sets, a row's result depends neither on other rows nor on the number of threads. Without it MKL has other kernels for
fewer than four rows, of the whole or of a thread's part; on one processor multiples of eight were equal, on one with
AMX 8 and 16 rows of 576 columns were not (torch 2.13)."""


class Step:
    """One forward pass: the slot of each token, and the places that it attends to. ``keys`` and ``values`` are the KV
    cache of every layer, [slots, heads, width, head dim]."""

    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        self._keys, self._values = keys, values
        self._segments: list[tuple[int, torch.Tensor, int, int, torch.Tensor | None]] = []
        self._blocks: list[tuple[slice, int, torch.Tensor]] | None = None
        self._positions = torch.zeros(0, dtype=torch.long)

    def prefill(self, start: int, rows: torch.Tensor, cached: int, length: int) -> None:
        """Add the tokens of ``rows``, row after row, from ``start`` on: places ``cached`` to ``length`` of each."""
        mask = None
        if cached:
            mask = torch.arange(length) <= torch.arange(cached, length).unsqueeze(1)
        self._segments.append((start, rows, cached, length, mask))

    def decode(self, positions: torch.Tensor, lengths: np.ndarray[Any, Any], step: int) -> None:
        """One token for each of the slots 0 … n-1, at ``positions``."""
        n, self._positions = len(lengths), positions
        longest = int(lengths.max()) + 1
        # rows of very different lengths are attended in blocks, each as wide as its own longest
        size = _BLOCK if n > _BLOCK and n * longest > 2 * int(lengths.sum()) else n
        self._blocks = []
        for start in range(0, n, size):
            rows = slice(start, min(start + size, n))
            width = min(self._keys[0].shape[2], -(-(int(lengths[rows].max()) + 1) // step) * step)
            mask = torch.zeros(rows.stop - start, 1, 1, width)
            mask.masked_fill_(torch.arange(width) > positions[rows].view(-1, 1, 1, 1), -torch.inf)
            self._blocks.append((rows, width, mask))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Store ``key`` and ``value`` [heads, tokens, dim] and attend with ``query``: [tokens, query heads, dim]."""
        if self._blocks is not None:
            return self._attend_decode(layer, query, key, value, scale)
        heads, tokens, dim = query.shape
        groups = heads // key.shape[0]
        out = query.new_empty(tokens, heads, dim)
        for start, rows, cached, length, mask in self._segments:
            count, new = len(rows), length - cached
            part = slice(start, start + count * new)
            q, k, v = (x[:, part].unflatten(1, (count, new)).transpose(0, 1) for x in (query, key, value))
            self._keys[layer][rows, :, cached:length] = k
            self._values[layer][rows, :, cached:length] = v
            if cached:
                k, v = self._keys[layer][rows, :, :length], self._values[layer][rows, :, :length]
            if groups > 1:
                k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
            attended = sdpa(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
            out[part] = attended.transpose(1, 2).reshape(count * new, heads, dim)
        return out

    def _attend_decode(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        keys, values, rows = self._keys[layer], self._values[layer], torch.arange(query.shape[1])
        keys[rows, :, self._positions] = key.transpose(0, 1)
        values[rows, :, self._positions] = value.transpose(0, 1)
        # the query heads that share a key head stand where several queries would: nothing is repeated. Two products of
        # matrices are a quarter faster here than scaled_dot_product_attention is.
        heads = key.shape[0]
        q = (query * (query.shape[2] ** -0.5 if scale is None else scale)).transpose(0, 1).unflatten(1, (heads, -1))
        attended = []
        for part, width, mask in self._blocks or ():
            k, v = (cache[part, :, :width].flatten(0, 1) for cache in (keys, values))
            scores = torch.bmm(q[part].flatten(0, 1), k.transpose(1, 2))
            weights = (scores.unflatten(0, (-1, heads)) + mask).softmax(-1).flatten(0, 1)
            attended.append(torch.bmm(weights, v).unflatten(0, (-1, heads)))
        return (attended[0] if len(attended) == 1 else torch.cat(attended)).flatten(1, 2)


class InvariantStep(Step):
    """A pass in which a token's attention depends, to the last bit, on its sequence and its place in it alone: not on
    rows beside it, nor on how many of its sequence's tokens are computed with it. Each token attends to whole buckets
    of places, up to its own, by products of a multiple of ``ROWS`` rows."""

    def __init__(self, keys: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        super().__init__(keys, values)
        # tokens [sequences, n] in the flat list, the slots of the sequences [sequences, 1], the places of the tokens
        # [sequences, n], and which of the attended places are after them [sequences, 1, 1, n, width]
        self._parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def prefill(self, start: int, rows: torch.Tensor, cached: int, length: int) -> None:
        tokens = torch.arange(start, start + len(rows) * (length - cached)).unflatten(0, (len(rows), -1))
        for first in range(cached - cached % BUCKET, length, BUCKET):
            places = torch.arange(max(first, cached), min(first + BUCKET, length))
            self._add(tokens[:, places - cached], rows, places.expand(len(rows), -1))

    def decode(self, positions: torch.Tensor, lengths: np.ndarray[Any, Any], step: int) -> None:
        for bucket in np.unique(lengths // BUCKET):
            rows = torch.from_numpy(np.flatnonzero(lengths // BUCKET == bucket))
            self._add(rows.unsqueeze(1), rows, positions[rows].unsqueeze(1))

    def _add(self, tokens: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
        width = (int(places[0, 0]) // BUCKET + 1) * BUCKET
        later = torch.arange(width) > places.unsqueeze(-1)
        self._parts.append((tokens, rows.unsqueeze(1), places, later[:, None, None]))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        heads, tokens, dim = query.shape
        groups = heads // key.shape[0]
        query = (query * (dim**-0.5 if scale is None else scale)).unflatten(0, (-1, groups))
        out = query.new_zeros(tokens, heads, dim)
        for cache, new in ((self._keys[layer], key), (self._values[layer], value)):
            for part, rows, places, _ in self._parts:
                cache[rows, :, places] = new[:, part].permute(1, 2, 0, 3)
        for part, rows, _, later in self._parts:
            width, n = later.shape[-1], groups * part.shape[1]
            k, v = (cache[rows[:, 0], :, :width].flatten(0, 1) for cache in (self._keys[layer], self._values[layer]))
            k, v = (pad(x, (0, 0, 0, width - x.shape[1])) for x in (k, v))
            missing = (0, 0, 0, -n % ROWS)
            q = query[:, :, part].permute(2, 0, 1, 3, 4).flatten(2, 3).flatten(0, 1)
            scores = torch.bmm(pad(q, missing), k.transpose(1, 2))[:, :n]
            by_group = scores.reshape(len(rows), -1, groups, part.shape[1], width).masked_fill(later, -torch.inf)
            attended = torch.bmm(pad(by_group.softmax(-1).reshape(scores.shape), missing), v)[:, :n]
            out[part] = attended.reshape(len(rows), heads, part.shape[1], dim).transpose(1, 2)
        return out


def slot_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    slot_step: Step,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function; batch and result are of one flat row."""
    return slot_step.attend(module.layer_idx, query[0], key[0], value[0], scaling).unsqueeze(0), None
