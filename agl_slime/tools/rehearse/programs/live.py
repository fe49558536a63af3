"""slime's own driver on a Ray of logical nodes, with stand-ins for Megatron's actors and for SGLang.

    python live.py        with the path of a request in AGL_SLIME_REHEARSAL

The request: ``nodes``, ``gpus``, ``script``, ``flags``, ``speeds``, ``shape``, ``events``, the file of the steps,
``store_bytes``; or ``script``, ``flags``, ``model`` and ``ranks``: steps with Megatron itself and the embedded engine.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from agl_slime.tools.rehearse.engine import REQUEST


def main(request: dict[str, Any]) -> None:
    from ray.cluster_utils import Cluster

    from agl_slime.tools.rehearse.actor import RehearsalActor, register_cpu, run_script

    register_cpu()
    gpus, memory = request["gpus"], request["store_bytes"]
    node = {"num_cpus": gpus + 4, "num_gpus": gpus, "object_store_memory": memory}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(request["nodes"] - 1):
            cluster.add_node(**node)
        run_script(Path(request["script"]), request["flags"], RehearsalActor, address=cluster.address)
    finally:
        cluster.shutdown()


def train(request: dict[str, Any]) -> None:
    from agl_slime.engine.process import EmbeddedEngine
    from agl_slime.tools.rehearse.megatron.__main__ import prepare, run

    prepare()
    with EmbeddedEngine(request["model"]) as engine:
        flags = [*request["flags"], "--rollout-external-engine-addrs", engine.url.removeprefix("http://")]
        run(Path(request["script"]), flags, num_gpus=request["ranks"], actor="RehearsedActor")


if __name__ == "__main__":
    content = json.loads(Path(os.environ[REQUEST]).read_text())
    train(content) if "model" in content else main(content)
