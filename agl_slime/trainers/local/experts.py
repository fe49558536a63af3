"""The engine's experts in the trainer's forward passes: routers of transformers' mixtures of experts are made to pick
what the engine picked (R3, arXiv:2510.11370). Their own probabilities of those experts weigh them, with gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agl_slime.engine.experts import routers_of
from agl_slime.errors import TrainerError

_FORCED = "_agl_slime_experts"


def force_experts(model: Any, experts: Tensor | None) -> None:
    """Have the next forward passes (and their recomputation) pick ``experts`` ``[tokens, layers, experts per token]``,
    for the tokens in the order in which they go through; ``None``: what the routers say themselves. Raises
    ``TrainerError`` when the shape is not the model's."""
    if experts is None:
        if hasattr(model, _FORCED):
            setattr(model, _FORCED, None)
        return
    if not hasattr(model, _FORCED):
        routers = routers_of(model)
        if not routers:
            raise TrainerError(f"samples have routed experts, and {type(model).__name__} has none that are known here.")
        for layer, router in routers.items():
            router.register_forward_hook(lambda module, _, said, at=layer: _replayed(module, said, model, at))
    top_k = int(next(iter(routers_of(model).values())).top_k)
    wanted = int(model.config.num_hidden_layers), top_k
    if tuple(experts.shape[1:]) != wanted:
        raise TrainerError(
            f"rollout_routed_experts are [*, layers, experts] = {tuple(experts.shape[1:])}, not {wanted}."
        )
    setattr(model, _FORCED, experts)


def _replayed(router: Any, said: Any, model: Any, layer: int) -> Any:
    forced = getattr(model, _FORCED)
    if forced is None:
        return None
    logits = said[0]
    ids = forced[:, layer].to(torch.int64)
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(-1, ids)
    if getattr(router, "norm_topk_prob", True):  # Mixtral's has no such switch, and does
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits, weights.to(said[1].dtype), ids
