"""A launch script's command line run on a CPU: slime's script as it stands, with our trainer in Megatron's place.

    python -m tests.programs.slime.launched SCRIPT FLAGS...

``ENGINE`` is the URL of an engine, ``ROUTER`` the URL of a router, ``WORK`` a directory. The flags that assign GPUs are
the caller's (``GPU_ARGS``); Ray is the one of ``RAY_ADDRESS``, or one of this process.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

import ray

from tests.programs.slime.common import as_flags, start_ray, weights_by_disk
from tests.programs.slime.loop import slimes_script


def main(script: str, flags: list[str]) -> None:
    from slime.utils.arguments import parse_args

    from tests.programs.slime.cpu import CpuTrainActor, register_cpu

    register_cpu()
    work, router = Path(os.environ["WORK"]), urlsplit(os.environ["ROUTER"])
    ours = weights_by_disk(work) | {"sglang-router-ip": "127.0.0.1", "sglang-router-port": router.port}
    ours |= {"rollout-external-engine-addrs": os.environ["ENGINE"].removeprefix("http://")}
    sys.argv = [script, *flags, *as_flags(ours)]
    args = parse_args()
    args.agl_metrics = str(work / "metrics.jsonl")
    module = slimes_script(Path(script).stem)
    module.create_training_models = functools.partial(module.create_training_models, actor_cls=CpuTrainActor)
    setup = "tests.programs.slime.cpu.register_cpu"
    if "RAY_ADDRESS" in os.environ:
        ray.init(runtime_env={"worker_process_setup_hook": setup})
    else:
        start_ray(num_gpus=1, setup_hook=setup)
    try:
        module.train(args)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
