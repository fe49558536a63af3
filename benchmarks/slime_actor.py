"""A train actor of slime's that takes a set time for a step, in Megatron's place (``benchmarks/overlap_slime.py``)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray
from slime.ray.train_actor import TrainRayActor


class SleepingActor(TrainRayActor):
    """One rank. Takes its batch from slime's object store, as every actor does, and sleeps ``agl_train_s`` seconds."""

    def init(self, args: Any, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int:
        self.args, self.role, self.version = args, role, 0
        args.rank, args.world_size = 0, 1
        self.train_parallel_config = self._get_parallel_config()
        return 0

    def train(self, rollout_id: int, rollout_data_ref: list[Any], external_data: Any = None) -> None:
        data: Any = ray.get(rollout_data_ref[self._rank].inner)
        assert len(data["tokens"]) == self.args.global_batch_size
        time.sleep(self.args.agl_train_s)

    def update_weights(self) -> None:
        self.version += 1
        (Path(self.args.update_weight_disk_dir) / f"weight_v{self.version:06d}").mkdir(parents=True, exist_ok=True)

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None: ...

    def clear_memory(self) -> None: ...

    def sleep(self, tags: Any = None) -> None: ...

    def wake_up(self, tags: Any = None) -> None: ...

    def _get_parallel_config(self) -> dict[str, int]:
        return {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
