"""Reading a checkpoint's weights and putting them into a running model, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from agl_slime.errors import ConfigError


def read_weights(directory: str | Path, model_bytes: int | None = None) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face checkpoint in safetensors form, sharded or not. Raises ``ConfigError`` when there
    is none, it cannot be read, or it is too large for a model of ``model_bytes`` in float32."""
    try:
        files = [file for file in sorted(Path(directory).glob("model*.safetensors")) if file.is_file()]
    except OSError as error:  # a path that is too long, or no permission
        raise ConfigError(f"model_path {str(directory)!r:.200} cannot be read: {error.strerror}") from error
    if not files:
        raise ConfigError(f"model_path {str(directory)!r} holds no model.safetensors: pass a Hugging Face checkpoint")
    # in float64, and tied weights twice, with their names
    if model_bytes is not None and sum(file.stat().st_size for file in files) > 4 * model_bytes + 2**20:
        problem = f"the checkpoint in {str(directory)!r} is too large for this model"
        raise ConfigError(f"{problem}: pass a checkpoint of this model")
    try:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except Exception as error:  # a truncated file: safetensors raises its own classes
        raise ConfigError(f"the checkpoint in {str(directory)!r} cannot be read: {error}") from error


def renamed_for(model: Any, tensors: dict[str, torch.Tensor], directory: str | Path) -> dict[str, torch.Tensor]:
    """``tensors`` under the model's parameter names: a checkpoint has one tensor per expert where transformers' models
    have one for all experts of a layer. Raises ``ConfigError`` when transformers cannot load it either."""
    parameters = dict(model.named_parameters())
    if not any(".experts." in name for name in tensors) or parameters.keys() <= tensors.keys():
        return tensors
    try:
        loaded, info = type(model).from_pretrained(
            directory, local_files_only=True, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # whatever transformers and safetensors raise for a checkpoint of another model
        raise ConfigError(f"the checkpoint in {str(directory)!r} cannot be loaded: {error}") from error
    if info["missing_keys"] or info["mismatched_keys"]:
        missing = sorted(map(str, info["missing_keys"] or info["mismatched_keys"]))
        raise ConfigError(f"the checkpoint does not fit the model: missing {missing[:3]}")
    return dict(loaded.named_parameters())


@torch.no_grad()
def load_weights(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy ``tensors`` into the model in place. Raises ``ConfigError``, the model unchanged, unless they are exactly
    its parameters with their shapes (tied ones may be left out) and all finite."""
    parameters = dict(model.named_parameters())
    # a shared tensor is listed once; the full list adds its other names
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(parameters)
    missing, unknown = sorted(set(parameters) - set(tensors)), sorted(set(tensors) - set(parameters) - tied)
    if missing or unknown:
        names = f"missing {missing[:3]}, not in the model {unknown[:3]}"
        raise ConfigError(f"the checkpoint does not fit the model: {names}")
    for name, tensor in tensors.items():
        if name in parameters and parameters[name].shape != tensor.shape:
            shapes = f"{list(tensor.shape)} and should be {list(parameters[name].shape)}"
            raise ConfigError(f"the checkpoint does not fit the model: {name} is {shapes}")
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"the checkpoint's {name} holds NaN or infinite values")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])
