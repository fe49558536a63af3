"""slime's own driver on a Ray of logical nodes, with stand-ins for Megatron's actors and for SGLang.

    python live.py        with the path of a request in AGL_SLIME_REHEARSAL

The request: ``nodes``, ``gpus``, ``script``, ``flags``, ``speeds``, ``shape``, ``events``, the file of the steps, and
``store_bytes``.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import ray
import slime.ray.placement_group as placement
from ray.cluster_utils import Cluster

from agl_slime.tools.rehearse.actor import RehearsalActor, register_cpu
from agl_slime.tools.rehearse.engine import REQUEST


def main(request: dict[str, Any]) -> None:
    register_cpu()
    create = placement.create_training_models
    placement.create_training_models = functools.partial(create, actor_cls=RehearsalActor)
    gpus, memory = request["gpus"], request["store_bytes"]
    node = {"num_cpus": gpus + 4, "num_gpus": gpus, "object_store_memory": memory}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(request["nodes"] - 1):
            cluster.add_node(**node)
        hook = {"worker_process_setup_hook": "agl_slime.tools.rehearse.actor.register_worker"}
        ray.init(address=cluster.address, runtime_env=hook)
        sys.argv = [request["script"], *request["flags"]]
        runpy.run_path(request["script"], run_name="__main__")
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(json.loads(Path(os.environ[REQUEST]).read_text()))
