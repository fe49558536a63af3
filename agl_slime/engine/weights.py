"""Reading a checkpoint's weights and putting them into a running model, all or nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from agl_slime.errors import ConfigError

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def read_weights(directory: str | Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face checkpoint in safetensors form, sharded or not. Raises ``ConfigError`` when there
    is none or it cannot be read."""
    path = Path(directory)
    try:
        if (path / _INDEX).is_file():
            names = sorted(set(json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        elif (path / _FILE).is_file():
            names = [_FILE]
        else:
            raise ConfigError(f"model_path {str(directory)!r} holds no {_FILE}: pass a Hugging Face checkpoint")
        tensors: dict[str, torch.Tensor] = {}
        for name in names:
            tensors.update(load_file(path / name))
    except ConfigError:
        raise
    except Exception as error:  # a file cut short, a broken index: safetensors and json raise classes of their own
        raise ConfigError(f"the checkpoint in {str(directory)!r} cannot be read: {error}") from error
    return tensors


def check_weights(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ``ConfigError`` unless ``tensors`` are exactly the model's parameters with their shapes (tied ones may be
    left out) and all finite."""
    own = dict(model.named_parameters())
    # a shared tensor is listed once; its other names are those that the full list has besides
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(own)
    missing = sorted(set(own) - set(tensors) - tied)
    unknown = sorted(set(tensors) - set(own) - tied)
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


@torch.no_grad()
def apply_weights(model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy checked ``tensors`` into the model in place."""
    own = dict(model.named_parameters())
    for name, tensor in tensors.items():
        if name in own:
            own[name].copy_(tensor)
