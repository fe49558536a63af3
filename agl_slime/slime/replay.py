"""Samples as slime takes them: arrays of routed experts and kept ids as int32 tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from agl_slime.errors import ConfigError, DataSourceError, MissingDependencyError
from agl_slime.types import ARRAY_FIELDS, Sample, flat_samples


def replay_sampling(args: Any) -> dict[str, Any]:
    """What slime's flags want the engine to send besides tokens, as sampling parameters of ours. Raises
    ``ConfigError`` for a flag without the sizes it needs."""
    wanted: dict[str, Any] = {}
    if getattr(args, "use_rollout_routing_replay", False):
        shape = [getattr(args, name, None) for name in ("num_layers", "moe_router_topk")]
        if not all(isinstance(size, int) and size >= 1 for size in shape):
            told = f"--num-layers {shape[0]} and --moe-router-topk {shape[1]}"
            raise ConfigError(f"--use-rollout-routing-replay needs the shape of the experts, and there are {told}")
        wanted["routed_experts"] = shape
    # a slime whose Sample has no place for kept ids trains without them
    if getattr(args, "rollout_top_p", 1.0) not in (None, 1.0) and hasattr(Sample, "rollout_top_p_token_ids"):
        wanted["nucleus"] = True
    return wanted


def with_tensors(groups: Sequence[Any]) -> Sequence[Any]:
    """``groups``, their arrays made int32 tensors in place. slime indexes with them: uint8 would be taken for a
    mask."""
    for sample in flat_samples(groups):
        for name in ARRAY_FIELDS:
            value = getattr(sample, name, None)
            if isinstance(value, np.ndarray):
                setattr(sample, name, _tensor(value))
    return groups


def with_train_inputs(groups: Sequence[Any], tokenizer: Any) -> Sequence[Any]:
    """``groups`` with ``multimodal_train_inputs`` in the Samples that show images, by the processor of ``tokenizer``.
    Raises ``DataSourceError`` where it has none."""
    for sample in flat_samples(groups):
        pictures = (sample.multimodal_inputs or {}).get("images")
        if not pictures or sample.multimodal_train_inputs is not None:
            continue
        if not hasattr(tokenizer, "train_inputs"):
            told = "rollouts show images, and the model's directory has no processor (preprocessor_config.json)"
            raise DataSourceError(f"{told}: name one that has with --hf-checkpoint")
        key = tuple((sample.metadata or {}).get("images") or map(repr, map(id, pictures)))
        sample.multimodal_train_inputs = tokenizer.train_inputs(pictures, key)
    return groups


def _tensor(values: np.ndarray[Any, Any]) -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingDependencyError("slime's replay of routed experts and nuclei needs torch") from error
    return torch.from_numpy(values.astype(np.int32))


def check_replayed(args: Any, group: Sequence[Sample]) -> None:
    """slime takes routed experts and kept ids from all samples or from none: raises ``DataSourceError`` for one that
    lacks what its flag needs."""
    wanted = {"routed_experts": ("--use-rollout-routing-replay", "rollout_routed_experts")}
    wanted["nucleus"] = ("--rollout-top-p", "rollout_top_p_token_ids")
    for setting in replay_sampling(args):
        flag, name = wanted[setting]
        for sample in flat_samples(group):
            if getattr(sample, name, None) is None:
                named = (sample.metadata or {}).get("agl_rollout_id")
                fix = "have the agent talk to the engine through agl-slime, with sampling parameters of the run"
                raise DataSourceError(f"rollout {named} has no {name}, which {flag} needs: {fix}")
