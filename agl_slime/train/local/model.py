"""The policy as a Hugging Face causal LM: loading, logits at given positions, low-rank adapters (``peft``; the layers'
weights stay frozen), checkpoints for SGLang, and its use of this machine."""

from __future__ import annotations

import copy
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import transformers  # its models take seconds to import, with the first one
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, MoeModelOutputWithPast
from transformers.utils import logging as transformers_logging

from agl_slime.engine.experts import routers_of
from agl_slime.errors import ConfigError, MissingDependencyError, TrainerError
from agl_slime.support.threads import usable_cores
from agl_slime.train.local.batch import MicroBatch
from agl_slime.train.local.settings import LocalTrainerSettings

_PACKED = "agl_slime_packed"  # name of the packed attention in transformers
_MAX_PACKED_SHARE = 0.9  # of the padded size

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack)(\.index\.json)?")

_ADAPTER = "default"

F = TypeVar("F", bound=Callable[..., Any])

_SMALL_MODEL = 5_000_000  # parameters; below, a second thread costs more than it gains


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
    if (given_shape := tuple(experts.shape[1:])) != shape:
        raise TrainerError(f"rollout_routed_experts are [*, layers, experts] = {given_shape}, not {shape}.")
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


def add_adapters(model: transformers.PreTrainedModel, settings: LocalTrainerSettings, *, seed: int = 0) -> None:
    """Add LoRA adapters (arXiv:2106.09685) to ``model`` and freeze everything else. They start as the identity.

    Raises:
        MissingDependencyError: peft is not installed.
        ConfigError: ``lora_rank`` is above the model's hidden size, or ``lora_targets`` names no layer of the model,
            a layer with tied weights, or the output layer alone.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingDependencyError('lora_rank needs peft: pip install "agl-slime[lora]"') from error
    if settings.lora_rank > (hidden := model.config.get_text_config().hidden_size):
        reason = f"the model's hidden size is {hidden}, and no update of its weights has a rank above it"
        raise ConfigError(f"lora_rank is {settings.lora_rank}: {reason}; set at most {hidden}, usual are 8 to 64.")
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # pyright: ignore[reportArgumentType]
        target_modules=list(settings.lora_targets) or "all-linear",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model, _ADAPTER)
        except ValueError as error:
            raise ConfigError(f"lora_targets is {settings.lora_targets!r}: {error}") from error
    model.eval()
    layers = [layer.get_base_layer() for _, layer in _adapted(model)]
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.replace(".base_layer.", "."))
    for layer in layers:
        if len(same := names[id(layer.weight)]) > 1:
            reason = f"{' and '.join(same)} are the same weights, and adapters would change one of them only"
            raise ConfigError(f"lora_targets is {settings.lora_targets!r}: {reason}; leave that layer out.")
    if layers == [output := model.get_output_embeddings()] or layers == [getattr(output, "base_layer", None)]:
        raise ConfigError(f"lora_targets is {settings.lora_targets!r}, the output layer alone; name others as well.")


def adapter_weights(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """The weights of the adapters by name: the trained parameters."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def merged_weights(model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """The weights of a model without adapters, with the adapters merged; the layers' weights stay unchanged."""
    changes = {name: layer.get_delta_weight(_ADAPTER) for name, layer in _adapted(model)}
    weights = {}
    for name, tensor in model.state_dict().items():
        layer, adapted, part = name.partition(".base_layer.")
        if adapted:
            name = f"{layer}.{part}"
            tensor = tensor + changes[layer] if part == "weight" else tensor
        if ".lora_" not in name:
            weights[name] = tensor.contiguous()
    return weights


def save_adapter(model: transformers.PreTrainedModel, directory: Path, *, base: Path) -> None:
    """Write the adapters alone in ``peft``'s format, for the model in ``base``."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    directory.mkdir()
    weights = get_peft_model_state_dict(model, adapter_name=_ADAPTER)  # pyright: ignore[reportArgumentType]
    named = {f"base_model.model.{name}": tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(named, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config: Any = copy.copy(model.peft_config[_ADAPTER])  # pyright: ignore[reportIndexIssue, reportCallIssue, reportArgumentType]
    config.base_model_name_or_path, config.task_type, config.inference_mode = str(base), "CAUSAL_LM", True
    config.save_pretrained(str(directory))


@contextmanager
def without_adapters(model: transformers.PreTrainedModel) -> Iterator[None]:
    """The model before training, while the context is open."""
    layers = [layer for _, layer in _adapted(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def base_checksum(model: transformers.PreTrainedModel) -> int:
    """Checksum of all frozen weights: adapters are valid only with the weights they were trained on."""
    value = 0
    for tensor in (parameter.detach() for parameter in model.parameters() if not parameter.requires_grad):
        value = zlib.crc32(tensor.cpu().contiguous().numpy().data, value)
    return value


def _adapted(model: transformers.PreTrainedModel) -> list[tuple[str, Any]]:
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def torch_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is CUDA if available. Raises ``ConfigError`` for a device that torch cannot
    use."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device is {name!r}, which torch cannot use here ({reason}); 'cpu' always works.") from error
    return device


def has_bfloat16(device: torch.device) -> bool:
    """Whether the hardware has instructions for bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def bfloat16_wanted(setting: Literal["auto", "float32", "bfloat16"], device: torch.device) -> bool:
    """Whether to compute in bfloat16. Raises ``ConfigError`` if requested on hardware that would emulate it."""
    has = has_bfloat16(device)
    if setting == "bfloat16" and not has:
        raise ConfigError(
            f"compute_dtype is 'bfloat16', which the {device.type} here has no instructions for; use 'auto'."
        )
    return has and (setting == "bfloat16" or (setting == "auto" and device.type == "cuda"))


def set_threads(setting: int | Literal["auto"] | None, model: torch.nn.Module) -> None:
    """Set torch's CPU threads for the whole process; ``None`` leaves them alone. ``auto`` stays within
    ``OMP_NUM_THREADS``, if set."""
    if setting is None:
        return
    if setting == "auto":
        small = sum(parameter.numel() for parameter in model.parameters()) < _SMALL_MODEL
        setting = 1 if small else usable_cores()
    torch.set_num_threads(setting)


def in_own_thread(method: F) -> F:
    """``method``, run in the ``thread`` of its object for callers of any thread."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.thread.submit(method, self, *args, **kwargs).result()

    return call  # type: ignore[return-value]
