"""Which experts the tokens of a forward pass went through, of transformers' mixtures of experts (Qwen3-MoE, OLMoE,
Mixtral): their routers answer logits, weights and expert ids."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agl_slime.errors import ConfigError

_LAYER = re.compile(r"layers\.(\d+)\.")


def routers_of(model: Any) -> dict[int, Any]:
    """The routers by the number of their layer; empty for a model without."""
    routers = {}
    for name, module in model.named_modules():
        if type(module).__name__.endswith("TopKRouter") and (layer := _LAYER.search(name)):
            routers[int(layer[1])] = module
    return routers


class ExpertCapture:
    """The outputs of the routers of ``model``, pass by pass."""

    def __init__(self, model: Any) -> None:
        routers = routers_of(model)
        if not routers:
            kind = type(model).__name__
            raise ConfigError(f"--enable-return-routed-experts: {kind} has no supported experts; leave it out")
        first = next(iter(routers.values()))
        self.shape = int(model.config.num_hidden_layers), int(first.top_k)
        self.dtype = np.uint8 if first.num_experts <= 256 else np.uint16
        self._seen: dict[int, torch.Tensor] = {}
        for layer, router in routers.items():
            router.register_forward_hook(
                lambda _module, _args, output, layer=layer: self._seen.update({layer: output[2]})
            )

    def take(self, tokens: int) -> NDArray[Any]:
        """``[tokens, layers, experts per token]`` of the last pass; zeros for layers without experts."""
        rows = np.zeros((tokens, *self.shape), dtype=self.dtype)
        for layer, indices in self._seen.items():
            rows[:, layer] = indices.numpy()
        self._seen.clear()
        return rows
