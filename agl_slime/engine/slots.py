"""A causal language model with rows of KV cache: prefill some rows, decode all of them together.

Active rows are always slots 0 … n-1, so a decode step works on views of the cache and copies nothing; a row that ends
is replaced by the last one. A forward pass takes its tokens as one flat list, whatever sequences they belong to, so no
token of padding is computed. It serves transformers' causal models with full attention alone (Qwen2, Qwen3, Llama).

**Prefixes are computed once.** A prompt that begins like a row that is active, or like one that has ended and was not
overwritten yet, copies that KV cache; equal prompts of one prefill, as the members of a group have, are
computed as one. Only rows whose KV cache is all of the current weights are copied from.

**Memory.** The cache is a rectangle, rows by tokens of the longest, and grows by need; ``max_total_tokens`` bounds it,
by default to a quarter of the machine's memory.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.functional import pad

from agl_slime.engine.attention import ATTENTION, ROWS, InvariantStep, Step, slot_attention
from agl_slime.engine.experts import ExpertCapture
from agl_slime.errors import ConfigError

_WIDTH_STEP = 16  # the attended width grows in steps, so that the allocator meets few different sizes
_REFUSED = "the embedded engine cannot serve this model ({}): use a real SGLang"
_HEAD_CHUNK = 1024
_LEAST_TOKENS = 16
_LEAST_REUSE = 16  # tokens; a shorter prefix is copied only when it is half of the prompt


@dataclass(frozen=True)
class Prefilled:
    """Computed prompts: ``logits`` after the last token of each, float32 [prompts, vocabulary]; ``hidden``, the last
    states of its computed tokens, [tokens, hidden size]; ``cached``, the number of its other tokens."""

    logits: torch.Tensor
    hidden: list[torch.Tensor]
    cached: list[int]


def _zeros(*shape: int) -> torch.Tensor:
    """Zeros, since a masked place has weight 0 and 0 * NaN is NaN; by numpy: torch's zeros commit all pages at once."""
    return torch.from_numpy(np.zeros(shape, dtype=np.float32))


class SlotModel:
    """``model`` with at most ``slots`` rows of at most ``context`` tokens each. Not thread-safe: one thread owns it."""

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        *,
        slots: int,
        context: int,
        max_total_tokens: int | None = None,
        prefix_cache: bool = True,
        capture: ExpertCapture | None = None,
        deterministic: bool = False,
    ) -> None:
        config: Any = model.config
        if kinds := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
            raise ConfigError(f"the embedded engine serves full attention only, not {sorted(kinds)}: use a real SGLang")
        self.model = model.eval()
        self.slots = slots
        self.prefix_cache = prefix_cache
        self._step = InvariantStep if deterministic else Step
        self._rows = ROWS if deterministic else 1
        self.active = 0
        layers = config.num_hidden_layers
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.bytes_per_token = 4 * 2 * layers * heads * head_dim
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        token_limit = memory // 4 // self.bytes_per_token if max_total_tokens is None else max_total_tokens
        if token_limit < _LEAST_TOKENS:
            raise ConfigError(f"max_total_tokens must be at least {_LEAST_TOKENS}, got {token_limit}")
        self.context = min(context, token_limit)
        self.capacity = min(slots * context, token_limit)
        self._base: Any = model.base_model
        self._head: Any = model.get_output_embeddings()
        self._keys, self._values = ([_zeros(0, heads, 0, head_dim) for _ in range(layers)] for _ in "kv")
        # per slot: its tokens, their number, whether all are of the current weights, and the last use
        self._ids = np.zeros((0, 0), dtype=np.int64)
        self.lengths = np.zeros(slots, dtype=np.int64)
        self._fresh = np.zeros(slots, dtype=bool)
        self._used = np.zeros(slots, dtype=np.int64)
        self._clock = 0
        self._capture = capture
        self._experts: np.ndarray[Any, Any] | None = None
        if capture is not None:
            self._experts = np.zeros((0, 0, *capture.shape), dtype=capture.dtype)
        self._check()

    @torch.inference_mode()
    def _check(self) -> None:
        """A few tokens as the model computes them by itself and as it does here: an architecture whose attention or
        head is of another kind is refused, not served wrongly."""
        ids = [token % self._head.weight.shape[0] for token in range(2, 10)]
        expected = self.model(torch.tensor([ids]), use_cache=False).logits[0, -1].float()
        transformers.AttentionInterface.register(ATTENTION, slot_attention)
        self.model.set_attn_implementation(ATTENTION)
        try:
            logits = self.prefill([ids[:-2]]).logits
            for token in ids[-2:]:
                logits = self.decode(torch.tensor([token]))
        except Exception as error:
            raise ConfigError(_REFUSED.format(f"{type(self.model).__name__}: {error}")) from error
        if not torch.allclose(logits[0], expected, rtol=1e-3, atol=1e-3, equal_nan=True):
            raise ConfigError(_REFUSED.format(type(self.model).__name__))
        self.release(0)
        self.flush()
        if self._rows > 1:
            beside = self.prefill([ids, ids[:3], ids[:5]][: self.slots]).logits[0]
            if not torch.equal(beside, logits[0]):
                reason = f"logits depend on the batch on this machine, with torch {torch.__version__}"
                raise ConfigError(f"deterministic: {reason}; leave it out")
            while self.active:
                self.release(0)
            self.flush()

    # -- room ---------------------------------------------------------------------------------------------------------

    def fits(self, rows: int, longest: int) -> bool:
        """Whether that many rows, the longest of that many tokens, are within ``slots`` and ``capacity``."""
        return rows <= self.slots and (rows <= 1 or rows * longest <= self.capacity)

    @property
    def longest(self) -> int:
        return int(self.lengths[: self.active].max(initial=0))

    def _reserve(self, rows: int, width: int) -> None:
        """Make the rectangle at least this large, and twice that where there is room: so it is seldom copied, and
        ended rows stay for prompts that extend them. Untouched pages are not committed."""
        have_rows, have_width = self._ids.shape
        if rows <= have_rows and width <= have_width:
            return
        if width > have_width:
            width = max(width, min(2 * width, self.context, self.capacity // rows))
        elif rows * have_width <= self.capacity:
            width = have_width
        rows = max(rows, min(self.slots, max(have_rows, 2 * rows), self.capacity // width))
        kept_rows, kept_width = min(rows, have_rows), min(width, have_width)
        for cache in (self._keys, self._values):
            for layer, old in enumerate(cache):
                cache[layer] = _zeros(rows, old.shape[1], width, old.shape[3])
                for row in np.flatnonzero(self.lengths[:kept_rows]).tolist():
                    length = min(int(self.lengths[row]), kept_width)
                    cache[layer][row, :, :length] = old[row, :, :length]
        if (experts := self._experts) is not None:
            self._experts = np.zeros((rows, width, *experts.shape[2:]), dtype=experts.dtype)
            self._experts[:kept_rows, :kept_width] = experts[:kept_rows, :kept_width]
        ids = np.zeros((rows, width), dtype=np.int64)
        ids[:kept_rows, :kept_width] = self._ids[:kept_rows, :kept_width]
        self._ids = ids
        self._forget((self.lengths > width) | (np.arange(self.slots) >= rows))

    def _forget(self, slots: Any) -> None:
        self.lengths[slots] = 0
        self._fresh[slots] = False

    def flush(self) -> None:
        """Forget the rows that have ended."""
        self._forget(np.s_[self.active :])

    def invalidate_cache(self) -> None:
        """Forget ended rows, and copy no active one as a prefix: the weights have changed."""
        self._fresh[:] = False
        self.flush()

    # -- forward passes -----------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], *, reuse: Sequence[int] | None = None) -> Prefilled:
        """Fill free slots with ``prompts``; at most ``reuse`` tokens of each are copied from rows that begin alike."""
        count, first = len(prompts), self.active
        lengths = [len(prompt) for prompt in prompts]
        self._reserve(first + count, max(self.longest, *lengths))
        self.active += count
        self._forget(np.s_[first : self.active])
        limits = [length - 1 if reuse is None else min(length - 1, reuse[i]) for i, length in enumerate(lengths)]
        # equal prompts are computed once; ``same`` says by which of them
        computed: dict[Any, int] = {}
        same = list(range(count))
        if self.prefix_cache and count > 1:
            same = [computed.setdefault((tuple(prompts[i]), limits[i]), i) for i in range(count)]
        matches = {i: self._longest_cached_prefix(prompts[i], limits[i]) for i in dict.fromkeys(same)}
        for i, (source, n_cached) in matches.items():
            if n_cached:
                self._copy(source, [first + i], n_cached)
        # sequences of equal lengths stand together: they are attended in one call
        order = sorted(matches, key=lambda i: (matches[i][1], lengths[i]))
        cached = [matches[same[i]][1] for i in range(count)]
        ids = torch.tensor([token for i in order for token in prompts[i][cached[i] :]])
        positions = torch.cat([torch.arange(cached[i], lengths[i]) for i in order])
        step = self._step(self._keys, self._values)
        start = 0
        for (n_cached, length), group in groupby(order, key=lambda i: (cached[i], lengths[i])):
            rows = torch.tensor([first + i for i in group])
            step.prefill(start, rows, n_cached, length)
            start += len(rows) * (length - n_cached)
        hidden = self._forward(ids, positions, step)
        if self._experts is not None and self._capture is not None:
            routed, offset = self._capture.take(len(ids)), 0
            for i in order:
                new = lengths[i] - cached[i]
                self._experts[first + i, cached[i] : lengths[i]] = routed[offset : offset + new]
                offset += new
        states = dict(zip(order, hidden.split([lengths[i] - cached[i] for i in order]), strict=True))
        for i in order:
            copies = [copy for copy in range(count) if same[copy] == i != copy]
            if copies:
                self._copy(first + i, [first + copy for copy in copies], lengths[i])
            for copy in copies:
                cached[copy] = max(cached[copy], limits[copy])
        for i, prompt in enumerate(prompts):
            self._ids[first + i, : lengths[i]] = prompt
        self._note_rows(np.s_[first : self.active], np.array(lengths), True)
        place = {i: number for number, i in enumerate(order)}
        logits = self._logits(torch.stack([states[i][-1] for i in order]))
        if count > 1:
            logits = logits[[place[i] for i in same]]
        return Prefilled(logits, [states[i] for i in same], cached)

    @torch.inference_mode()
    def decode(self, last_ids: torch.Tensor) -> torch.Tensor:
        """Append ``last_ids`` (int64 [active]) to the active rows; returns the logits, float32 [active, vocabulary]."""
        n = self.active
        lengths = self.lengths[:n]
        self._reserve(n, int(lengths.max()) + 1)
        self._ids[np.arange(n), lengths] = last_ids.numpy()
        positions = torch.from_numpy(lengths.copy())
        step = self._step(self._keys, self._values)
        step.decode(positions, lengths, _WIDTH_STEP)
        hidden = self._forward(last_ids, positions, step)
        if self._experts is not None and self._capture is not None:
            self._experts[np.arange(n), lengths] = self._capture.take(n)
        lengths += 1
        return self._logits(hidden)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        n, missing = len(ids), (0, -len(ids) % self._rows)
        ids, positions = pad(ids, missing).unsqueeze(0), pad(positions, missing).unsqueeze(0)
        options: dict[str, Any] = {"use_cache": False, "slot_step": step}
        return self._base(input_ids=ids, position_ids=positions, **options).last_hidden_state[0, :n]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, vocabulary] of ``hidden`` [tokens, hidden size]."""
        weight = self._head.weight
        if missing := -len(hidden) % self._rows:
            return self._logits(pad(hidden, (0, 0, 0, missing)))[: len(hidden)]
        if len(hidden) == 1 or len(weight) <= _HEAD_CHUNK or getattr(self._head, "bias", None) is not None:
            return self._head(hidden).float()
        # in parts of the vocabulary, which stay in the cache: 20 to 30 % faster than one product
        out = hidden.new_empty(len(hidden), len(weight))
        for start in range(0, len(weight), _HEAD_CHUNK):
            part = slice(start, start + _HEAD_CHUNK)
            torch.mm(hidden, weight[part].t(), out=out[:, part])
        return out.float()

    @torch.inference_mode()
    def log_probs(self, hidden: torch.Tensor, ids: Sequence[int], *, chunk: int = 256) -> list[float]:
        """Log-probs at temperature 1 of ``ids`` after ``hidden`` [tokens, hidden size], few logits at a time."""
        targets = torch.tensor(ids, dtype=torch.long).unsqueeze(1)
        values: list[float] = []
        for start in range(0, len(ids), chunk):
            logits = self._logits(hidden[start : min(start + chunk, len(ids))])
            chosen = logits.gather(1, targets[start : start + chunk]).squeeze(1)
            values += (chosen - logits.logsumexp(-1)).tolist()
        return values

    def routed(self, row: int, start: int) -> np.ndarray[Any, Any] | None:
        """The experts of the tokens of an active row from ``start`` on, where they are captured."""
        return None if self._experts is None else self._experts[row, start : int(self.lengths[row])].copy()

    # -- rows ---------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def release(self, row: int) -> int | None:
        """Free ``row``. Returns the row whose content moved into its place, or None when it was the last.

        Its tokens stay in a free slot, the least recently used one, for prompts that extend them.
        """
        last = self.active - 1
        self.active = last
        keep = self.prefix_cache and self._fresh[row]
        spare = np.arange(len(self._ids) - 1, last, -1)  # the slots that are filled last come first
        if keep and len(spare):
            self._move(row, int(spare[np.where(self.lengths[spare] > 0, self._used[spare], -1).argmin()]))
        elif keep and row == last:
            return None
        if row == last:
            self._forget(row)
            return None
        self._move(last, row)
        self._forget(last)
        return last

    def _longest_cached_prefix(self, prompt: Sequence[int], limit: int) -> tuple[int, int]:
        """The fresh row that begins most like ``prompt``, and how many tokens of it to copy, at most ``limit``."""
        width = min(limit, self._ids.shape[1])
        if not self.prefix_cache or width < 1 or not self._fresh.any():
            return 0, 0
        rows = np.flatnonzero(self._fresh)
        same = self._ids[rows, :width] == np.asarray(prompt[:width])
        common = np.where(same.all(1), width, same.argmin(1))
        common = np.minimum(common, self.lengths[rows])
        best = int(common.argmax())
        if common[best] < min(_LEAST_REUSE, len(prompt) // 2):
            return 0, 0
        self._clock += 1
        self._used[rows[best]] = self._clock
        return int(rows[best]), int(common[best])

    def _copy(self, source: int, rows: list[int], length: int) -> None:
        """The first ``length`` tokens' KV cache of a row into others."""
        for cache in (*self._keys, *self._values):
            # a copy of its own: where rows are full, torch does not write what it reads in the same call
            cache[rows, :, :length] = cache[source, :, :length].clone()
        if self._experts is not None:
            self._experts[rows, :length] = self._experts[source, :length]

    def _move(self, source: int, row: int) -> None:
        length = int(self.lengths[source])
        for cache in (*self._keys, *self._values):
            cache[row, :, :length] = cache[source, :, :length]
        if self._experts is not None:
            self._experts[row, :length] = self._experts[source, :length]
        self._ids[row, :length] = self._ids[source, :length]
        self._note_rows(row, length, self._fresh[source])

    def _note_rows(self, rows: Any, lengths: Any, fresh: Any) -> None:
        self._clock += 1
        self.lengths[rows], self._fresh[rows], self._used[rows] = lengths, fresh, self._clock
