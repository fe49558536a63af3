"""A train actor that steps our local trainer in slime's loop on a CPU.

This is Megatron's place in slime v0.3.1, whose Megatron runs on GPUs only, and where hosts are small; everything around
it (Ray, placement groups, the manager, the weight update) is slime's own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ray
from slime.ray.train_actor import TrainRayActor

from agl_slime.tools.rehearse.actor import register_cpu
from agl_slime.train.local.settings import LocalTrainerSettings
from agl_slime.train.local.trainer import LocalTrainer
from agl_slime.types import Sample, sample_from_fields

__all__ = ["CpuTrainActor", "register_cpu"]


class CpuTrainActor(TrainRayActor):
    """A ``TrainRayActor`` of one rank. Writes a line of metrics per step to ``args.agl_metrics``."""

    def init(self, args: Any, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int:
        # not the base class's init: it sets up process groups and NUMA for ranks on GPUs
        self.args, self.role = args, role
        args.rank, args.world_size = 0, 1
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.train_parallel_config = self._get_parallel_config()
        self.trainer = LocalTrainer(
            model_path=args.hf_checkpoint,
            # the rewards in slime's batch are advantages already; log-probs are of the whole batch before any step, as
            # Megatron's are
            settings=LocalTrainerSettings(rewards_normalization=False, old_log_probs="recompute"),
            temperature=args.rollout_temperature,
        )
        self.version = 0
        return 0

    def train(self, rollout_id: int, rollout_data_ref: list[Any], external_data: Any = None) -> None:
        data: Any = ray.get(rollout_data_ref[self._rank].inner)
        batch = {name: _per_sample(value) for name, value in data.items()}
        metrics = self.trainer.train(_samples(batch), iteration=rollout_id)
        raw_rewards = [batch["raw_reward"][position] for position in batch["partition"]]
        reward = sum(raw_rewards) / len(raw_rewards)
        with open(self.args.agl_metrics, "a") as lines:
            lines.write(json.dumps({"step": rollout_id, "reward": reward, "version": self.version, **metrics}) + "\n")

    def update_weights(self) -> None:
        # the group of actors then has every engine load this directory: pause, flush, update, continue
        self.version += 1
        self.trainer.save_weights(Path(self.args.update_weight_disk_dir) / f"weight_v{self.version:06d}")

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    save_model = clear_memory = sleep = wake_up = _nothing

    def _get_parallel_config(self) -> dict[str, int]:
        return {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}


def _samples(batch: dict[str, Any]) -> list[Sample]:
    names = {name: f"{name}s" for name in ("response_length", "reward", "loss_mask", "rollout_id")}
    names |= {name: name for name in ("tokens", "rollout_log_probs")}
    columns = zip(*(batch[key] for key in names.values()), strict=True)
    return [sample_from_fields(**dict(zip(names, row, strict=True))) for row in columns]


def _per_sample(value: Any) -> Any:
    if isinstance(value, list | range):
        return [_per_sample(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
