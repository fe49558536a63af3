"""Reading a checkpoint's weights and putting them into a running model, all or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from agl_slime.errors import ConfigError


def read_weights(directory: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face checkpoint in safetensors form, sharded or not. Raises ``ConfigError`` when there
    is none or it cannot be read."""
    if not (files := sorted(Path(directory).glob("model*.safetensors"))):
        raise ConfigError(f"model_path {str(directory)!r} holds no model.safetensors: pass a Hugging Face checkpoint")
    try:
        return {name: tensor for file in files for name, tensor in load_file(file).items()}
    except Exception as error:  # a file cut short: safetensors raises classes of its own
        raise ConfigError(f"the checkpoint in {str(directory)!r} cannot be read: {error}") from error


@torch.no_grad()
def load_weights(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy ``tensors`` into the model in place. Raises ``ConfigError``, the model unchanged, unless they are exactly
    its parameters with their shapes (tied ones may be left out) and all finite."""
    own = dict(model.named_parameters())
    # a shared tensor is listed once; its other names are those that the full list has besides
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(own)
    missing, unknown = sorted(set(own) - set(tensors)), sorted(set(tensors) - set(own) - tied)
    if missing or unknown:
        raise ConfigError(
            f"the checkpoint does not fit the model: missing {missing[:3]}, not in the model {unknown[:3]}"
        )
    for name, tensor in tensors.items():
        if name in own and own[name].shape != tensor.shape:
            shapes = f"{list(tensor.shape)} and should be {list(own[name].shape)}"
            raise ConfigError(f"the checkpoint does not fit the model: {name} is {shapes}")
        if not bool(torch.isfinite(tensor).all()):
            raise ConfigError(f"the checkpoint's {name} holds NaN or infinite values")
    for name, parameter in own.items():
        parameter.copy_(tensors[name])
