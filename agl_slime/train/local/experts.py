"""Replay of the engine's routed experts in the trainer's forward passes (R3, arXiv:2510.11370): transformers' routers
pick the engine's experts and weight them by their own probabilities, with gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agl_slime.engine.experts import routers_of
from agl_slime.errors import TrainerError

_FORCED = "_agl_slime_experts"


def force_experts(model: Any, experts: Tensor | None) -> None:
    """Make the next forward passes (and their recomputation) pick ``experts`` ``[tokens, layers, experts per token]``,
    in the order of the tokens; with ``None`` the routers choose. Raises ``TrainerError`` for another shape than the
    model's."""
    if experts is None:
        if hasattr(model, _FORCED):
            setattr(model, _FORCED, None)
        return
    if not hasattr(model, _FORCED):
        routers = routers_of(model)
        if not routers:
            raise TrainerError(f"samples have routed experts, and {type(model).__name__} has no known routers.")
        for layer, router in routers.items():
            router.register_forward_hook(lambda module, _, output, at=layer: _replay(module, output, model, at))
    top_k = int(next(iter(routers_of(model).values())).top_k)
    wanted = int(model.config.num_hidden_layers), top_k
    if tuple(experts.shape[1:]) != wanted:
        raise TrainerError(
            f"rollout_routed_experts are [*, layers, experts] = {tuple(experts.shape[1:])}, not {wanted}."
        )
    setattr(model, _FORCED, experts)


def _replay(router: Any, output: Any, model: Any, layer: int) -> Any:
    forced = getattr(model, _FORCED)
    if forced is None:
        return None
    logits = output[0]
    ids = forced[:, layer].to(torch.int64)
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, ids)
    if getattr(router, "norm_topk_prob", True):  # Mixtral normalizes without the switch
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits, weights.to(output[1].dtype), ids
