"""The policy as a Hugging Face causal LM: loading, logits at given positions, and checkpoints for SGLang."""

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
import transformers  # its models take seconds to import, with the first one
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, MoeModelOutputWithPast
from transformers.utils import logging as transformers_logging

from agl_slime.engine.experts import routers_of
from agl_slime.errors import ConfigError, TrainerError
from agl_slime.train.local.batch import MicroBatch

_PACKED = "agl_slime_packed"  # name of the packed attention in transformers
_MAX_PACKED_SHARE = 0.9  # of the padded size

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack)(\.index\.json)?")


def load_model(directory: Path, *, device: torch.device, images: bool = False) -> transformers.PreTrainedModel:
    """The checkpoint's causal LM in float32 and evaluation mode (dropout would make the trainer's log-probs differ from
    the engine's); with ``images``, one that reads them as such. Raises ``ConfigError`` for an unreadable or incomplete
    checkpoint."""
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model_path {directory} has no config.json; give the directory of a checkpoint.")
    try:
        with _no_progress_bars():
            kind: Any = transformers.AutoModelForCausalLM
            if images and hasattr(
                transformers.AutoConfig.from_pretrained(directory, local_files_only=True), "vision_config"
            ):
                kind = transformers.AutoModelForImageTextToText
            loaded: Any = kind.from_pretrained(
                directory, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ConfigError(f"the checkpoint in {directory} cannot be loaded: {error}") from error
    model, info = loaded
    if info["missing_keys"]:  # transformers would fill them with random numbers
        missing = sorted(info["missing_keys"])
        raise ConfigError(f"the checkpoint in {directory} lacks {len(missing)} weights of its model, as {missing[0]}.")
    return model.to(device).eval()


def hidden_at(model: transformers.PreTrainedModel, micro: MicroBatch) -> Tensor:
    """The hidden states before the output layer, at the ``N`` positions that predict a token under the loss mask:
    ``[N, hidden]``.

    The sequences are one packed row if the model allows it (:func:`packs`) and padding or repeated prefixes would cost
    more than a tenth; else rows padded on the right, where causal attention ignores the padding.
    """
    ids, positions, cells, homes, sources = (
        torch.from_numpy(array).to(model.device)
        for array in (micro.ids, micro.positions, micro.cells, micro.homes, micro.sources)
    )
    body: Any = model.base_model
    experts = None if micro.experts is None else torch.from_numpy(micro.experts.astype(np.int64)).to(model.device)
    if len(ids) < _MAX_PACKED_SHARE * cells.numel() and packs(model):
        packed = _Packed(cells, homes)
        force_experts(model, experts)
        output = body(input_ids=ids[None], position_ids=positions[None], use_cache=False, packed=packed)
        return output.last_hidden_state[0, sources]
    force_experts(model, None if experts is None else experts[cells].flatten(0, 1))
    return body(input_ids=ids[cells], use_cache=False).last_hidden_state.flatten(0, 1)[homes[sources]]


def logits_of(model: transformers.PreTrainedModel, hidden: Tensor) -> Tensor:
    """The logits ``[N, vocabulary]`` of ``hidden`` ``[N, hidden]``, from the model without its body: its scaling and
    soft-capping of logits apply."""
    body: Any = model.base_model
    experts = getattr(model.config, "num_experts_per_tok", None) is not None  # these models read router logits
    kind: Any = MoeModelOutputWithPast if experts else BaseModelOutputWithPastAndCrossAttentions
    output = kind(last_hidden_state=hidden.unsqueeze(0))
    body.forward = lambda *_, **__: output
    try:
        return model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=hidden.device)).logits.squeeze(0)
    finally:
        del body.forward


class _Packed(NamedTuple):
    """The layout of a packed row's ids in rows, one per sequence, as in :class:`MicroBatch`."""

    cells: Tensor
    homes: Tensor


def packs(model: transformers.PreTrainedModel) -> bool:
    """Whether :func:`allow_packing` allowed several sequences in one row of ``model``."""
    return model.config._attn_implementation == _PACKED


def allow_packing(model: transformers.PreTrainedModel) -> None:
    """Allow several sequences in one row without padding, with common prefixes once. Only the attention, a small share
    of the work, separates them into rows.

    A trial on a few random ids decides: a model with other attention than transformers' (or with a limited window)
    gives different results and stays unchanged.
    """
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    attention = model.config._attn_implementation
    if attention != "sdpa" or kinds != {"full_attention"} or getattr(model.config, "sliding_window", None):
        return
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr]
    ids = np.random.default_rng(0).integers(0, int(vocabulary), 12)  # type: ignore[arg-type]
    sequences = [ids[:2], ids[:7], np.concatenate([ids[:3], ids[7:]])]
    probe = MicroBatch.from_sequences(sequences, sources=np.arange(17), targets=ids, token_index=ids)
    transformers.AttentionInterface.register(_PACKED, _packed_attention)
    with torch.no_grad():
        padded = hidden_at(model, probe)
        model.set_attn_implementation(_PACKED)
        try:
            same = torch.allclose(hidden_at(model, probe), padded, rtol=1e-3, atol=1e-3 * float(padded.abs().max()))
        except (TypeError, ValueError, RuntimeError):
            same = False
    if not same:
        model.set_attn_implementation(attention)


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
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    def unpack(packed_row: Tensor) -> Tensor:
        return packed_row.squeeze(0).transpose(0, 1)[packed.cells].transpose(1, 2)

    attended, _ = sdpa_attention_forward(module, unpack(query), unpack(key), unpack(value), None, **kwargs)
    return attended.flatten(0, 1)[packed.homes].unsqueeze(0), None


def checkpoint_layers(model: transformers.PreTrainedModel) -> None:
    """Keep only each layer's input for the backward pass, which recomputes the rest: a third more time for a fraction
    of the memory. transformers' switch works only in training mode, which has dropout."""
    kind = transformers.GradientCheckpointingLayer
    layers: list[Any] = [module for module in model.modules() if isinstance(module, kind)]
    if not layers:
        raise ConfigError(f"gradient_checkpointing: the layers of {type(model).__name__} are unknown; turn it off.")
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)


def save_model(
    model: transformers.PreTrainedModel,
    directory: Path,
    *,
    source: Path,
    weights: dict[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write the weights, or ``weights`` in their place, as safetensors of ``dtype``, with copies of the other files of
    the checkpoint in ``source`` (config, tokenizer, chat template) except ``agl_slime_...``, which describe the origin
    of its weights."""
    if dtype != torch.float32:
        rounded: dict[int, Tensor] = {}  # tied weights stay one tensor
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
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


_FORCED = "_agl_slime_experts"


def force_experts(model: Any, experts: Tensor | None) -> None:
    """Make the next forward passes (and their recomputation) pick ``experts`` ``[tokens, layers, experts per token]``,
    in the order of the tokens; with ``None``, and where they are negative, the routers choose. Raises ``TrainerError``
    for another shape than the model's."""
    if experts is None:
        if hasattr(model, _FORCED):
            setattr(model, _FORCED, None)
        return
    if not hasattr(model, _FORCED):
        routers = routers_of(model)
        if not routers:
            raise TrainerError(f"samples have routed experts, and {type(model).__name__} has no known routers.")
        for layer, router in routers.items():
            router.register_forward_hook(lambda module, _, output, layer=layer: _replay(module, output, model, layer))
    top_k = int(next(iter(routers_of(model).values())).top_k)
    shape = int(model.config.get_text_config().num_hidden_layers), top_k
    if (actual := tuple(experts.shape[1:])) != shape:
        raise TrainerError(f"rollout_routed_experts are [*, layers, experts] = {actual}, not {shape}.")
    setattr(model, _FORCED, experts)


def _replay(router: Any, output: Any, model: Any, layer: int) -> Any:
    forced = getattr(model, _FORCED)
    if forced is None:
        return None
    logits = output[0]
    ids = forced[:, layer].to(torch.int64)
    ids = torch.where(ids < 0, output[2], ids)
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, ids)
    if getattr(router, "norm_topk_prob", True):  # Mixtral normalizes without the switch
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits, weights.to(output[1].dtype), ids
