"""Replay data of Samples in slime's form: routed experts and kept token ids as int32 tensors, and image inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from agl_slime.errors import ConfigError, DataSourceError, missing_as_error
from agl_slime.types import ARRAY_FIELDS, Sample, flat_samples


def replay_sampling(args: Any) -> dict[str, Any]:
    """Our sampling parameters for the replay data that slime's flags need from the engine. Raises ``ConfigError`` for a
    flag without its sizes."""
    sampling: dict[str, Any] = {}
    if getattr(args, "use_rollout_routing_replay", False):
        shape = [getattr(args, name, None) for name in ("num_layers", "moe_router_topk")]
        if not all(isinstance(size, int) and size >= 1 for size in shape):
            values = f"--num-layers {shape[0]} and --moe-router-topk {shape[1]}"
            raise ConfigError(f"--use-rollout-routing-replay needs the shape of the experts, and got {values}")
        sampling["routed_experts"] = shape
    # a slime whose Sample has no such field trains without kept ids
    if getattr(args, "rollout_top_p", 1.0) not in (None, 1.0) and hasattr(Sample, "rollout_top_p_token_ids"):
        sampling["nucleus"] = True
    return sampling


def in_slimes_form(groups: Sequence[Any], tokenizer: Any = None) -> Sequence[Any]:
    """``groups``, changed in place: arrays become int32 tensors (slime indexes with them, and would treat uint8 as a
    mask), and Samples with images get ``multimodal_train_inputs``, by the processor of ``tokenizer``. Raises
    ``DataSourceError`` when there is no processor."""
    for sample in flat_samples(groups):
        for name in ARRAY_FIELDS:
            if isinstance(value := getattr(sample, name, None), np.ndarray):
                setattr(sample, name, _tensor(value))
        pictures = (sample.multimodal_inputs or {}).get("images")
        if not pictures or sample.multimodal_train_inputs is not None:
            continue
        if not hasattr(tokenizer, "train_inputs"):
            reason = "rollouts have images, and the model's directory has no processor (preprocessor_config.json)"
            raise DataSourceError(f"{reason}: name a directory with one by --hf-checkpoint")
        key = tuple((sample.metadata or {}).get("images") or map(repr, map(id, pictures)))
        sample.multimodal_train_inputs = tokenizer.train_inputs(pictures, key)
    return groups


def _tensor(values: np.ndarray[Any, Any]) -> Any:
    with missing_as_error("slime's replay of routed experts and nuclei needs torch"):
        import torch
    return torch.from_numpy(values.astype(np.int32))


def check_recorded(args: Any, group: Sequence[Sample]) -> None:
    """Raise ``DataSourceError`` for a sample without the engine's data that slime's flags need: slime takes replay data
    from all samples or from none, and decides on log-probs by the first sample of a batch."""
    needed = [
        ("rollout_log_probs", "log-probs of the engine", f"--{name.replace('_', '-')}", "or leave the flag out")
        for name in ("use_tis", "use_rollout_logprobs")
        if getattr(args, name, False)
    ]
    fields = {"routed_experts": ("rollout_routed_experts", "--use-rollout-routing-replay")}
    fields["nucleus"] = ("rollout_top_p_token_ids", "--rollout-top-p")
    for name, flag in (fields[setting] for setting in replay_sampling(args)):
        needed.append((name, name, flag, "with the run's sampling parameters"))
    for name, words, flag, fix in needed:
        for sample in flat_samples(group):
            if getattr(sample, name, None) is None:
                rollout_id = (sample.metadata or {}).get("agl_rollout_id")
                fix = f"have the agent call the engine through agl-slime, {fix}"
                raise DataSourceError(f"rollout {rollout_id} has no {words}, which {flag} needs: {fix}")
