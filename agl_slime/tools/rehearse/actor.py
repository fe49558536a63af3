"""Stand-ins for Megatron's actors and for GPUs, in Ray's workers: placement, data, weight updates and all timing around
them are slime's own."""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from slime.ray.ray_actor import RayActor
from slime.ray.train_actor import TrainRayActor

from agl_slime.tools.rehearse.engine import REQUEST


def register_cpu() -> None:
    """Make slime's accelerator layer (HEAD) take the CPU; called in every Ray worker. Older versions have no such layer
    and need none."""
    try:
        from slime.utils.accelerator import register_accelerator
        from slime.utils.accelerator.base import Accelerator
    except ImportError:
        return

    cpu = torch.device("cpu")
    answers = {"is_available": True, "device": cpu, "device_name": "cpu", "current_device": "cpu", "device_count": 1}
    answers |= dict.fromkeys(("set_device", "synchronize", "current_stream", "empty_cache"))
    answers |= {"mem_get_info": (0, 0), "memory_allocated": 0, "memory_reserved": 0}
    methods = {name: lambda *_, answer=answer, **__: answer for name, answer in answers.items()}
    names = {"name": "cpu", "device_type": "cpu", "communication_backend_name": "gloo"}
    CPU = type("CPU", (Accelerator,), {**names, **methods})
    register_accelerator("cpu", CPU, lambda: True, priority=1000, communication_backends=("gloo",))


def register_worker() -> None:
    """Ray's hook of each worker process: the accelerator, and ports of its own, as all nodes share one address."""
    register_cpu()
    chosen = RayActor._get_current_node_ip_and_free_port
    offset = os.getpid() % 400 * 40

    def separate_ports(start_port: int = 10000, consecutive: int = 1) -> Any:
        first = start_port in (10_000, 15_000)  # later ones continue from an earlier answer
        return chosen(start_port=start_port + first * offset, consecutive=consecutive)

    RayActor._get_current_node_ip_and_free_port = staticmethod(separate_ports)


def run_script(script: Path, flags: Sequence[str], actor: type, **options: Any) -> None:
    """Run slime's training script as a program, with a class of actors, on the Ray of these ``options`` of its init."""
    import slime.ray.placement_group as placement

    placement.create_training_models = partial(placement.create_training_models, actor_cls=actor)
    ray.init(runtime_env={"worker_process_setup_hook": "agl_slime.tools.rehearse.actor.register_worker"}, **options)
    sys.argv = [str(script), *flags]
    sys.path.insert(0, str(script.parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        ray.shutdown()


class RehearsalActor(TrainRayActor):
    """A rank that takes its batch, sleeps for as long as training it would take, and has the engines load weights that
    are none. Rank 0 writes a line per step."""

    def init(self, args: Any, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int:
        # not the base class's init, which sets up process groups and NUMA for ranks on GPUs
        self.args, self.role = args, role
        args.rank, args.world_size = self._rank, self._world_size
        self.request = json.loads(Path(os.environ[REQUEST]).read_text())
        self.train_parallel_config = self._get_parallel_config()
        self.version = 0
        return 0

    def train(self, rollout_id: int, rollout_data_ref: list[Any], external_data: Any = None) -> None:
        began = time.time()
        data: Any = ray.get(rollout_data_ref[self._rank // self._inner % len(rollout_data_ref)].inner)
        tokens = sum(data["response_lengths"]) * len(rollout_data_ref)
        speeds = self.request["speeds"]
        seconds = speeds["train_s"] + speeds["train_token_s"] * tokens
        time.sleep(seconds + bool(self.args.colocate) * speeds["offload_s"])
        self._write(event="train", step=rollout_id, began=began, ended=time.time(), tokens=tokens)

    def update_weights(self) -> None:
        self.version += 1
        if self._rank == 0 and self.args.update_weight_mode == "full" and self.args.update_weight_transport == "disk":
            Path(self.args.update_weight_disk_dir, f"weight_v{self.version:06d}").mkdir(parents=True, exist_ok=True)
        elif self._rank == 0:
            engines, *_ = ray.get(self.rollout_manager.get_updatable_engines_and_lock.remote())
            ray.get([engine.pause_generation.remote() for engine in engines])
            ray.get([engine.flush_cache.remote() for engine in engines])
            version = str(self.version)
            ray.get([engine.update_weights_from_disk.remote("rehearsal", weight_version=version) for engine in engines])
            ray.get([engine.continue_generation.remote() for engine in engines])
        self._write(event="update", version=self.version, ended=time.time())

    def _write(self, **record: Any) -> None:
        if self._rank == 0:
            with open(self.request["events"], "a") as lines:
                lines.write(json.dumps(record) + "\n")

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    save_model = clear_memory = sleep = wake_up = _nothing

    @property
    def _inner(self) -> int:
        """Neighbouring ranks that share a data-parallel rank's batch."""
        return self.args.tensor_model_parallel_size * self.args.context_parallel_size

    def _get_parallel_config(self) -> dict[str, int]:
        ranks = self._world_size // (self._inner * self.args.pipeline_model_parallel_size)
        cp = self.args.context_parallel_size
        return {"dp_size": ranks, "cp_size": cp, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
