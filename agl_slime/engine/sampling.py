"""Sampling of one token per row, every row with its own temperature, top_p and top_k.

Conventions, all SGLang's:

- The reported log-prob is log_softmax(logits / temperature) at the sampled token, before any cut by top_k and top_p.
- Temperature 0 means greedy, with the log-prob at temperature 1, since SGLang makes it temperature 1 with top_k 1.
- top_k and top_p both cut the whole sorted distribution; a token stays while the mass before it is at most top_p.

One difference: SGLang reports the log-prob of a row with top_k 1 and a temperature above 0 at temperature 1 when every
row of its batch is greedy, and at the row's temperature otherwise. Here it is always at the row's temperature, so that
an answer never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from agl_slime.engine.requests import Request

ALL_TOKENS = 1 << 30
"""The top_k that cuts nothing; SGLang's -1."""
_UINT64, _GOLDEN = 2**64 - 1, np.uint64(0x9E3779B97F4A7C15)
_FLAT = 4096  # vocabularies up to this size are drawn from in one step
_FEW = 1024  # the most likely tokens, which hold all that top_k and top_p leave, nearly always


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
    nucleus: bool
    """A row reports what its cut leaves."""
    top: int
    """The most of the likeliest tokens that a row reports."""

    @classmethod
    def for_requests(cls, requests: Iterable[Request]) -> RowParams:
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
            nucleus=any(request.sampling.nucleus for request in requests),
            top=max(request.top_logprobs for request in requests),
        )


Sampled = tuple[torch.Tensor, torch.Tensor, list[list[tuple[float, int]]], dict[int, list[int]]]


def uniforms(requests: Sequence[Request]) -> torch.Tensor:
    """Three numbers in [0, 1) for the next token of each request, float64 [rows, 3], from its seed and the token's
    place alone: neither from time nor from other requests, and a resumed answer has the draws of an uncut one.
    SplitMix64 (Steele, Lea and Flood 2014), with the place as its counter."""
    seeds = np.array([(request.seed or 0) & _UINT64 for request in requests], np.uint64)
    places = np.array([len(request.input_ids) + len(request.output_ids) for request in requests], np.uint64)
    counters = (_mix(seeds) + places)[:, None] * np.uint64(3) + np.arange(3, dtype=np.uint64)
    return torch.from_numpy((_mix(counters * _GOLDEN) >> np.uint64(11)) * 2.0**-53)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(31))


def sample(logits: torch.Tensor, params: RowParams, draws: torch.Tensor) -> Sampled:
    """Sampled token ids (int64 [rows]) and their log-probs (float32 [rows]) from ``logits`` [rows, vocabulary] and the
    rows' ``draws`` (``uniforms``), and of each row the ``params.top`` likeliest tokens, empty for none. Where a row
    wants its nucleus, the last has what top_k and top_p leave of each row that they cut, by the row's number; the
    log-prob of such a row is of that."""
    scaled = logits if params.unit else logits / params.temperature.unsqueeze(1)
    # one copy of the logits' size serves the log-probs' denominator and the draw
    peak = scaled.amax(-1, keepdim=True)
    weights = (scaled - peak).exp_()
    # of a single row several threads would each sum a part, which has other last bits
    sums = weights.expand(max(2, len(weights)), -1).sum(-1)[: len(weights)]
    normalizer = peak.squeeze(1) + sums.log_()
    if params.greedy:
        ids = logits.argmax(-1)  # of the logits themselves: rounding could make two log-probs equal
    else:
        ids = _draw(weights, draws)
        if not params.plain:
            ids = torch.where(params.top_k == 1, logits.argmax(-1), ids)
            cut = ((params.top_k != 1) & ((params.top_k < ALL_TOKENS) | (params.top_p < 1.0))).nonzero().squeeze(1)
            if len(cut):
                ids[cut] = _draw_cut(weights[cut], params.top_p[cut], params.top_k[cut], draws[cut, 2])
    log_probs = scaled.gather(1, ids.unsqueeze(1)).squeeze(1) - normalizer
    nuclei: dict[int, list[int]] = {}
    if params.nucleus:
        for row in ((params.top_k < ALL_TOKENS) | (params.top_p < 1.0)).nonzero().squeeze(1).tolist():
            nucleus = _kept(weights[row], float(params.top_p[row]), int(params.top_k[row]), int(ids[row]))
            log_probs[row] = scaled[row, ids[row]] - scaled[row, nucleus].logsumexp(0)
            nuclei[row] = nucleus.tolist()
    tops: list[list[tuple[float, int]]] = []
    if params.top:
        values, likeliest = scaled.topk(min(params.top, scaled.shape[1]), dim=-1)
        values -= normalizer.unsqueeze(1)
        tops = [list(zip(*row, strict=True)) for row in zip(values.tolist(), likeliest.tolist(), strict=True)]
    return ids, log_probs, tops, nuclei


def _kept(weights: torch.Tensor, top_p: float, top_k: int, sampled: int) -> torch.Tensor:
    """The ids that top_p and top_k leave of a row, and the sampled one in any case."""
    ordered, order = (weights / weights.sum()).sort(descending=True, stable=True)
    preceding = ordered.cumsum(0) - ordered
    nucleus = order[(preceding <= top_p) & (torch.arange(len(order)) < top_k)]
    return nucleus if (nucleus == sampled).any() else torch.cat((nucleus, torch.tensor([sampled])))


def _draw_cut(weights: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    probabilities = weights / weights.sum(-1, keepdim=True)
    width = weights.shape[1]
    few = min(width, _FEW)
    ordered, order = probabilities.topk(few) if few < width else probabilities.sort(descending=True, stable=True)
    # a sort of everything costs ten times as much, and is needed where the few do not hold all that stays
    if few < width and not bool(((top_k <= few) | (ordered.sum(-1) > top_p)).all()):
        ordered, order = probabilities.sort(descending=True, stable=True)
    preceding = ordered.cumsum(-1) - ordered
    ranks = torch.arange(ordered.shape[1]).unsqueeze(0)
    allowed = (preceding <= top_p.unsqueeze(1)) & (ranks < top_k.unsqueeze(1))
    return order.gather(1, _pick(ordered * allowed, draws).unsqueeze(1)).squeeze(1)


def _draw(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """One place per row, each as likely as its share of the row's weights. A large vocabulary is drawn from in two
    steps, a block of tokens and a token of that block: one pass over the weights instead of several."""
    rows, width = weights.shape
    block = next((size for size in (256, 128, 64) if width > _FLAT and width % size == 0), None)
    if block is None:
        return _pick(weights, draws[:, 0])
    blocks = weights.view(rows, -1, block)
    chosen = _pick(blocks.sum(-1), draws[:, 0])
    return chosen * block + _pick(blocks[torch.arange(rows), chosen], draws[:, 1])


def _pick(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    # Inverse of the cumulative distribution in float64: one uniform number per row, several times cheaper than
    # torch.multinomial here. A token of weight 0 is never drawn: the first place where the cumulative weight exceeds
    # the point always has a weight of its own, and the point stays below the total.
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    point = draws.unsqueeze(1) * total
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    # weights that are not finite, as of a model whose logits are not, still give a place
    return torch.searchsorted(cumulative, point, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)
