"""A causal language model with a fixed number of key-value slots: prefill some rows, decode all of them together.

Active rows are always slots 0 … n-1, so a decode step works on views of the cache and copies nothing; a row that ends
is replaced by the last one. Prompts are right-padded: under causal attention the padding changes nothing, so prefill
needs no mask. Works with transformers' causal models whose layers all have full attention (Qwen2, Qwen3, Llama).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from agl_slime.errors import ConfigError

_WIDTH_STEP = 16  # the attended width grows in steps, so that the allocator meets few different sizes


class _Plan:
    """Which part of the cache the running forward pass reads and writes; shared by all layers."""

    def __init__(self) -> None:
        self.prefill: slice | None = None  # the slots being filled, or None for a decode step
        self.rows = torch.zeros(0, dtype=torch.long)
        self.positions = torch.zeros(0, dtype=torch.long)
        self.width = 0


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, each [slots, kv heads, context, head dim], allocated once."""

    keys: Any  # tensors from the start, unlike in the base class
    values: Any
    is_sliding = False
    is_compileable = False

    def __init__(self, plan: _Plan, *, slots: int, heads: int, context: int, head_dim: int) -> None:
        super().__init__()
        self._plan = plan
        # zeros and not empty: a masked place counts with weight 0, and 0 * NaN would be NaN. The pages are only claimed
        # when written.
        self.keys = torch.zeros(slots, heads, context, head_dim)
        self.values = torch.zeros(slots, heads, context, head_dim)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plan = self._plan
        if plan.prefill is not None:
            length = key_states.shape[2]
            self.keys[plan.prefill, :, :length] = key_states
            self.values[plan.prefill, :, :length] = value_states
            return key_states, value_states
        self.keys[plan.rows, :, plan.positions] = key_states[:, :, 0]
        self.values[plan.rows, :, plan.positions] = value_states[:, :, 0]
        n = len(plan.rows)
        return self.keys[:n, :, : plan.width], self.values[:n, :, : plan.width]

    # What transformers asks of a layer besides; a decode step brings its own mask: these matter for prefill only.
    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        pass

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return (query_length if isinstance(query_length, int) else len(query_length)), 0

    def get_seq_length(self, *args: Any) -> int:
        return 0

    def get_max_cache_shape(self) -> int:
        return int(self.keys.shape[2])

    get_max_length = get_max_cache_shape


class SlotModel:
    """``model`` with ``slots`` rows of ``context`` tokens each. Not thread-safe: one thread owns it."""

    def __init__(self, model: PreTrainedModel, *, slots: int, context: int) -> None:
        config: Any = model.config
        if kinds := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
            raise ConfigError(f"the embedded engine serves full attention only, not {sorted(kinds)}: use a real SGLang")
        self.model = model.eval()
        self.slots, self.context = slots, context
        self.active = 0
        self.lengths = [0] * slots  # tokens held per slot, on the host
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._plan = _Plan()
        self._layers = [
            SlotLayer(self._plan, slots=slots, heads=config.num_key_value_heads, context=context, head_dim=head_dim)
            for _ in range(config.num_hidden_layers)
        ]
        self._cache = Cache(layers=list(self._layers))
        self._base: Any = model.base_model
        self._head: Any = model.get_output_embeddings()
        self._all = torch.arange(max(slots, context))

    @torch.inference_mode()
    def prefill(
        self, prompts: Sequence[Sequence[int]], *, every_position: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Fill the next free slots with ``prompts``.

        Returns the logits after each prompt's last token, float32 [prompts, vocabulary], and with ``every_position``
        also those after every token, [prompts, longest, vocabulary] (padding included).
        """
        lengths = [len(prompt) for prompt in prompts]
        longest = max(lengths)
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : lengths[row]] = torch.tensor(prompt)
        first = self.active
        self._plan.prefill = slice(first, first + len(prompts))
        hidden = self._base(
            input_ids=ids, position_ids=self._all[:longest].unsqueeze(0), past_key_values=self._cache, use_cache=True
        ).last_hidden_state
        self.lengths[first : first + len(prompts)] = lengths
        self.active += len(prompts)
        last = self._head(hidden[self._all[: len(prompts)], torch.tensor(lengths) - 1]).float()
        return last, self._head(hidden).float() if every_position else None

    @torch.inference_mode()
    def decode(self, last_ids: torch.Tensor) -> torch.Tensor:
        """Append ``last_ids`` (int64 [active]) to the active rows and return the logits after them, float32 [active,
        vocabulary]."""
        n = self.active
        plan = self._plan
        plan.prefill = None
        plan.rows = self._all[:n]
        positions = plan.positions = torch.tensor(self.lengths[:n])
        plan.width = min(self.context, -(-(max(self.lengths[:n]) + 1) // _WIDTH_STEP) * _WIDTH_STEP)
        mask = (self._all[: plan.width] <= positions.unsqueeze(1))[:, None, None, :]
        hidden = self._base(
            input_ids=last_ids.unsqueeze(1),
            attention_mask=mask,
            position_ids=positions.unsqueeze(1),
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        for row in range(n):
            self.lengths[row] += 1
        return self._head(hidden[:, 0]).float()

    @torch.inference_mode()
    def release(self, row: int) -> int | None:
        """Free ``row``. Returns the row whose content moved into its place, or None when it was the last."""
        self.active -= 1
        last = self.active
        if row == last:
            return None
        length = self.lengths[row] = self.lengths[last]
        for layer in self._layers:
            layer.keys[row, :, :length] = layer.keys[last, :, :length]
            layer.values[row, :, :length] = layer.values[last, :, :length]
        return last
