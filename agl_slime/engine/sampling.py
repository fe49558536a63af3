"""Sampling of one token per row, every row with its own temperature, top_p and top_k.

Conventions, all SGLang's:

- The reported log-prob is log_softmax(logits / temperature) at the sampled token, before top_k and top_p cut anything
  away.
- Temperature 0 means greedy and its log-prob is at temperature 1, since SGLang turns temperature 0 into temperature 1
  with top_k 1.
- top_k and top_p are both applied to the full distribution sorted in descending order; a token stays while the mass
  before it is at most top_p.

One difference: SGLang reports the log-prob of a row with top_k 1 and a temperature above 0 at temperature 1 when every
row of its batch is greedy, and at the row's temperature otherwise. Here it is always at the row's temperature, so that
an answer never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from agl_slime.engine.requests import Request

ALL_TOKENS = 1 << 30
"""The top_k that cuts nothing; SGLang's -1."""


@dataclass
class RowParams:
    """Sampling parameters of some rows: ``temperature`` and ``top_p`` are float32 [rows], ``top_k`` int64 [rows] with
    ``ALL_TOKENS`` for no cut."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    plain: bool
    """No row cuts anything by top_k or top_p."""
    greedy: bool
    """Every row takes its first choice."""
    unit: bool
    """Every temperature is 1."""
    top: int
    """The most of the likeliest tokens that a row reports."""

    @classmethod
    def of(cls, requests: Iterable[Request]) -> RowParams:
        requests = list(requests)
        normal = [
            (1.0, row.top_p, 1)
            if row.temperature < 1e-6
            else (row.temperature, row.top_p, ALL_TOKENS if row.top_k == -1 else row.top_k)
            for row in (request.sampling for request in requests)
        ]
        temperature, top_p, top_k = (torch.tensor(column) for column in zip(*normal, strict=True))
        return cls(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            plain=bool((top_k == ALL_TOKENS).all() and (top_p >= 1.0).all()),
            greedy=bool((top_k == 1).all()),
            unit=bool((temperature == 1.0).all()),
            top=max(request.top_logprobs for request in requests),
        )


Sampled = tuple[torch.Tensor, torch.Tensor, list[list[tuple[float, int]]]]


def sample(logits: torch.Tensor, params: RowParams, generator: torch.Generator) -> Sampled:
    """Sampled token ids (int64 [rows]) and their log-probs (float32 [rows]) from ``logits`` [rows, vocabulary], and of
    each row the ``params.top`` likeliest tokens, empty for none."""
    scaled = logits if params.unit else logits / params.temperature.unsqueeze(1)
    log_probs = torch.log_softmax(scaled, dim=-1)
    if params.greedy:
        ids = log_probs.argmax(-1)
    elif params.plain:
        ids = _draw(log_probs.exp(), generator)
    else:
        ordered, order = log_probs.exp().sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        ranks = torch.arange(ordered.shape[1]).unsqueeze(0)
        kept = (before <= params.top_p.unsqueeze(1)) & (ranks < params.top_k.unsqueeze(1))
        ids = order.gather(1, _draw(ordered * kept, generator).unsqueeze(1)).squeeze(1)
    tops: list[list[tuple[float, int]]] = []
    if params.top:
        values, likeliest = log_probs.topk(min(params.top, log_probs.shape[1]), dim=-1)
        tops = [list(zip(*row, strict=True)) for row in zip(values.tolist(), likeliest.tolist(), strict=True)]
    return ids, log_probs.gather(1, ids.unsqueeze(1)).squeeze(1), tops


def _draw(weights: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    # Inverse of the cumulative distribution in float64: one uniform number per row, several times cheaper than
    # torch.multinomial here. A token of weight 0 is never drawn: the first place where the cumulative weight exceeds
    # the point always has a weight of its own, and the point stays below the total.
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    point = torch.rand(weights.shape[0], 1, dtype=torch.float64, generator=generator) * total
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point, right=True).squeeze(1)
