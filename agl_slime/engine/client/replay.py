"""An engine's choices that a trainer can replay: the experts of each token, and the nucleus of each sampled token.
SGLang's forms in, small arrays out; no I/O here."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agl_slime.errors import EngineProtocolError

Shape = tuple[int, int]
"""(layers, experts per token)."""


@dataclass(frozen=True, eq=False, slots=True)
class RoutedExperts:
    """The experts of the tokens at ``start`` to ``start + n`` of a sequence, whose last token has gone through none:
    ``rows`` ``[n, layers, experts per token]``, uint8 where that holds them, else uint16."""

    start: int
    rows: NDArray[Any]

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    def joined(self, later: RoutedExperts) -> RoutedExperts:
        """The rows of both, of ``later`` where both have some; these alone where rows between are missing."""
        if not self.start <= later.start <= self.end:
            return self
        rows = np.concatenate((self.rows[: later.start - self.start], later.rows))
        return RoutedExperts(self.start, rows)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutedExperts):
            return NotImplemented
        return self.start == other.start and np.array_equal(self.rows, other.rows)


@dataclass(frozen=True, eq=False, slots=True)
class Nucleus:
    """The ids that top_p and top_k left, of token ``i`` ``ids[offsets[i]:offsets[i + 1]]``; int32 both."""

    ids: NDArray[np.int32]
    offsets: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def select(self, tokens: NDArray[np.int64]) -> Nucleus:
        counts = np.diff(self.offsets)[tokens]
        starts, offsets = self.offsets[tokens], np.concatenate(([0], np.cumsum(counts)))
        places = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
        return Nucleus(self.ids[places], offsets.astype(np.int32))

    def joined(self, later: Nucleus) -> Nucleus:
        offsets = np.concatenate((self.offsets, later.offsets[1:] + self.offsets[-1]))
        return Nucleus(np.concatenate((self.ids, later.ids)), offsets)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Nucleus):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.offsets, other.offsets)


def narrowed(experts: NDArray[np.int32], *, endpoint: str) -> NDArray[Any]:
    """``experts`` as the smallest unsigned integers that hold them."""
    if not experts.size:
        return experts.astype(np.uint8)
    if (largest := experts.view(np.uint32).max()) > 0xFFFF:  # where a negative number is a large one
        raise EngineProtocolError(f"{endpoint} answered routed_experts outside of 0 to 65535: its capture is broken")
    return experts.astype(np.uint8 if largest < 256 else np.uint16)


def parse_experts(
    meta: Mapping[str, Any], shape: Shape, *, length: int, start: int, endpoint: str, required: bool
) -> RoutedExperts | None:
    """The rows from ``start`` on that ``meta_info`` has for a sequence of ``length`` tokens; ``None`` where it has
    none. How many there are says where they begin: an engine that knows no start sends all.

    Raises ``EngineProtocolError`` naming flag and shape when they do not fit, or are missing and ``required``.
    """
    values = _int32(meta, "routed_experts", endpoint)
    if values is None and required:
        fault = "answered no routed_experts for --use-rollout-routing-replay or --routed-experts: start SGLang with"
        raise EngineProtocolError(f"{endpoint} {fault} --enable-return-routed-experts")
    if values is None:
        return None
    layers, top_k = shape
    count, rest = divmod(values.size, layers * top_k)
    begins = length - 1 - count
    reported = meta.get("routed_experts_start_len")
    if rest or begins < 0 or begins > start or (reported is not None and reported != begins):
        expected = f"[{max(0, length - 1 - start)}, {layers}, {top_k}] (tokens, layers, experts per token)"
        fix = "check --num-layers and --moe-router-topk (locally the model's config.json) against the served model"
        problem = f"{values.size} routed_experts, which do not fit {expected}"
        raise EngineProtocolError(f"{endpoint} answered {problem}: {fix}")
    rows = narrowed(values[(start - begins) * layers * top_k :], endpoint=endpoint).reshape(-1, layers, top_k)
    rows.flags.writeable = False
    return RoutedExperts(start, rows)


def parse_nucleus(
    meta: Mapping[str, Any], *, count: int, endpoint: str, required: bool, vocab_size: int | None
) -> Nucleus | None:
    """The kept ids of ``count`` sampled tokens; ``None`` where ``meta_info`` has none and they are not ``required``."""
    ids, offsets = (_int32(meta, f"top_p_token_{name}", endpoint) for name in ("ids", "offsets"))
    if (ids is None or offsets is None) and required:
        fault = "answered no top_p_token_ids, which training on a nucleus (top_p below 1, or top_k) needs: stock SGLang"
        fix = "does not send them, apply slime's docker/patch/*/sglang-top_p.patch or sample with top_p 1"
        raise EngineProtocolError(f"{endpoint} {fault} {fix}")
    if ids is None or offsets is None:
        return None
    fits = len(offsets) == count + 1 and offsets[0] == 0 and offsets[-1] == len(ids) and (np.diff(offsets) >= 0).all()
    if not fits:
        counts = f"{len(offsets)} top_p_token_offsets and {len(ids)} ids for {count} sampled tokens"
        rule = "offsets must be one more than tokens and end at the ids"
        raise EngineProtocolError(f"{endpoint} answered {counts}: {rule}")
    if len(ids) and (ids.min() < 0 or ids.max() >= (vocab_size or 2**31)):
        raise EngineProtocolError(f"{endpoint} answered top_p_token_ids outside the model's vocabulary")
    return Nucleus(ids, offsets)


def _int32(meta: Mapping[str, Any], name: str, endpoint: str) -> NDArray[np.int32] | None:
    value = meta.get(name)
    if value is None:
        return None
    try:
        raw = base64.b64decode(value)  # without validation, which takes longer than all else: sizes are checked
        return np.frombuffer(raw, dtype="<i4").astype(np.int32, copy=False)
    except (TypeError, ValueError, binascii.Error) as error:
        raise EngineProtocolError(f"{endpoint} answered {name} that is no base64 of int32: {value!r:.80}") from error
