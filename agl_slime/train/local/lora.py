"""Low-rank adapters with ``peft``: the layers' weights stay frozen, the trained parameters are a few per cent."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from agl_slime.errors import ConfigError, missing_as_error
from agl_slime.train.local.settings import LocalTrainerSettings

_ADAPTER = "default"


def add_adapters(model: transformers.PreTrainedModel, settings: LocalTrainerSettings, *, seed: int = 0) -> None:
    """Add LoRA adapters (arXiv:2106.09685) to ``model`` and freeze everything else. They start as the identity.

    Raises:
        MissingDependencyError: peft is not installed.
        ConfigError: ``lora_rank`` is above the model's hidden size, or ``lora_targets`` names no layer of the model,
            a layer with tied weights, or the output layer alone.
    """
    with missing_as_error('lora_rank needs peft: pip install "agl-slime[lora]"'):
        from peft import LoraConfig, inject_adapter_in_model
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
