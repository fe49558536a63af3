"""The policy as a Hugging Face causal LM: loading it, its logits where they are needed, and checkpoints that SGLang
reads."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from agl_slime.errors import ConfigError
from agl_slime.trainers.local.batch import MicroBatch
from agl_slime.trainers.local.experts import force_experts

_PACKED = "agl_slime_packed"  # the name of our attention among transformers'
_WORTH_PACKING = 0.9

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack)(\.index\.json)?")


def load_model(directory: Path, *, device: torch.device) -> PreTrainedModel:
    """The checkpoint's causal LM in float32 and evaluation mode (dropout would make the trainer's log-probs differ from
    the engine's). Raises ``ConfigError`` when ``directory`` holds no readable and complete one."""
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model_path {directory} holds no config.json; give the directory of a checkpoint.")
    try:
        with _no_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ConfigError(f"the checkpoint in {directory} cannot be loaded: {error}") from error
    model, info = loaded
    if info["missing_keys"]:  # transformers would fill them with random numbers
        missing = sorted(info["missing_keys"])
        raise ConfigError(f"the checkpoint in {directory} lacks {len(missing)} weights of its model, as {missing[0]}.")
    return model.to(device).eval()


def hidden_at(model: PreTrainedModel, micro: MicroBatch) -> Tensor:
    """What the model knows at the ``N`` positions that predict a token under the loss mask, right before its output
    layer: ``[N, hidden]``.

    The sequences go through as one packed row where the model allows it (:func:`packs`) and padding, or what they
    have in common, would cost more than a tenth; else in rows padded on the right, to which nothing attends with causal
    attention.
    """
    ids, positions, cells, homes, sources = (
        torch.from_numpy(array).to(model.device)
        for array in (micro.ids, micro.positions, micro.cells, micro.homes, micro.sources)
    )
    body: Any = model.base_model
    experts = None if micro.experts is None else torch.from_numpy(micro.experts.astype(np.int64)).to(model.device)
    if len(ids) < _WORTH_PACKING * cells.numel() and packs(model):
        packed = _Packed(cells, homes)
        force_experts(model, experts)
        output = body(input_ids=ids[None], position_ids=positions[None], use_cache=False, packed=packed)
        return output.last_hidden_state[0, sources]
    force_experts(model, None if experts is None else experts[cells].flatten(0, 1))
    return body(input_ids=ids[cells], use_cache=False).last_hidden_state.flatten(0, 1)[homes[sources]]


def logits_of(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """The logits ``[N, vocabulary]`` of ``hidden`` ``[N, hidden]``: the model with its body left out, so that what it
    does to its logits (scaling, soft-capping) still happens."""
    body: Any = model.base_model
    experts = getattr(model.config, "num_experts_per_tok", None) is not None  # whose models look for router logits
    kind: Any = MoeModelOutputWithPast if experts else BaseModelOutputWithPastAndCrossAttentions
    known = kind(last_hidden_state=hidden.unsqueeze(0))
    body.forward = lambda *_, **__: known
    try:
        return model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=hidden.device)).logits.squeeze(0)
    finally:
        del body.forward


class _Packed(NamedTuple):
    """How the ids of a packed row lie in rows, one for each sequence; as in :class:`MicroBatch`."""

    cells: Tensor
    homes: Tensor


def packs(model: PreTrainedModel) -> bool:
    """Whether :func:`allow_packing` found that several sequences may go through ``model`` as one row."""
    return model.config._attn_implementation == _PACKED


def allow_packing(model: PreTrainedModel) -> None:
    """Let several sequences go through the model as one row without padding, in which what they have in common from
    their first id on is there once. They are apart only in the attention itself, a small share of the work, where they
    are laid in rows.

    Found out by trying, on a few random ids: a model whose attention is not transformers' (or does not see every
    token before) gives other results that way, and is left as it is.
    """
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    given = model.config._attn_implementation
    if given != "sdpa" or kinds != {"full_attention"} or getattr(model.config, "sliding_window", None):
        return
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr]
    ids = np.random.default_rng(0).integers(0, int(vocabulary), 12)  # type: ignore[arg-type]
    sequences = [ids[:2], ids[:7], np.concatenate([ids[:3], ids[7:]])]
    probe = MicroBatch.of(sequences, sources=np.arange(17), targets=ids, token_index=ids)
    ALL_ATTENTION_FUNCTIONS.register(_PACKED, _packed_attention)
    with torch.no_grad():
        padded = hidden_at(model, probe)
        model.set_attn_implementation(_PACKED)
        try:
            same = torch.allclose(hidden_at(model, probe), padded, rtol=1e-3, atol=1e-3 * float(padded.abs().max()))
        except (TypeError, ValueError, RuntimeError):
            same = False
    if not same:
        model.set_attn_implementation(given)


def _packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed: _Packed | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention over each sequence of a packed row; ``query``, ``key`` and ``value`` are ``[1, heads, L,
    head_dim]``, the result ``[1, L, heads, head_dim]``."""
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    def laid_out(packed_row: Tensor) -> Tensor:
        return packed_row.squeeze(0).transpose(0, 1)[packed.cells].transpose(1, 2)

    attended, _ = sdpa_attention_forward(module, laid_out(query), laid_out(key), laid_out(value), None, **kwargs)
    return attended.flatten(0, 1)[packed.homes].unsqueeze(0), None


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only what enters each layer for the backward pass, which computes the rest again: a third more time for a
    fraction of the memory. transformers' own switch does it in training mode only, which has dropout as well."""
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"gradient_checkpointing: {type(model).__name__} does not say what its layers are; leave it out."
        )
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def save_model(
    model: PreTrainedModel,
    directory: Path,
    *,
    source: Path,
    weights: dict[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the weights, or ``weights`` in their place, as safetensors of ``dtype``, and every other file of the
    checkpoint in ``source`` (config, tokenizer, chat template) as it is there, but for ``agl_slime_...``, which say how
    the weights in ``source`` were made."""
    if dtype != torch.float32:
        rounded: dict[int, Tensor] = {}  # what the model has under two names stays one tensor
        whole = model.state_dict() if weights is None else weights
        for tensor in whole.values():
            rounded[tensor.data_ptr()] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        weights = {name: rounded[tensor.data_ptr()] for name, tensor in whole.items()}
    with _no_progress_bars():
        model.save_pretrained(directory, state_dict=weights)
    for path in source.iterdir():
        if path.is_file() and not path.name.startswith((".", "agl_slime_")) and not _WEIGHTS.fullmatch(path.name):
            shutil.copyfile(path, directory / path.name)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
