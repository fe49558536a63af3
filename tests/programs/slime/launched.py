"""A launch script's command line run on a CPU: slime's script as it stands, with its Megatron actors.

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

from agl_slime.tools.rehearse.megatron.__main__ import prepare
from agl_slime.tools.rehearse.megatron.cuda import VARIABLES
from tests.programs.slime.common import as_flags, start_ray, weights_by_disk
from tests.programs.slime.loop import slimes_script

SETUP = "agl_slime.tools.rehearse.actor.register_worker"


def main(script: str, flags: list[str]) -> None:
    prepare()
    from slime.utils.arguments import parse_args

    from agl_slime.tools.rehearse.megatron.actor import MegatronTrainRayActor

    work, router = Path(os.environ["WORK"]), urlsplit(os.environ["ROUTER"])
    ours = weights_by_disk(work) | {"sglang-router-ip": "127.0.0.1", "sglang-router-port": router.port}
    ours |= {"rollout-external-engine-addrs": os.environ["ENGINE"].removeprefix("http://")}
    ours |= {"dump-details": work / "dump", "make-vocab-size-divisible-by": 1}
    sys.argv = [script, *flags, *as_flags(ours)]
    args = parse_args()
    module = slimes_script(Path(script).stem)
    create = module.create_training_models
    module.create_training_models = functools.partial(create, actor_cls=MegatronTrainRayActor)
    if "RAY_ADDRESS" in os.environ:
        os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"  # the job has a path of its own
        variables = {name: os.environ[name] for name in ("PYTHONPATH", *VARIABLES)}
        ray.init(runtime_env={"worker_process_setup_hook": SETUP, "env_vars": variables})
    else:
        start_ray(num_gpus=1, setup_hook=SETUP)
    try:
        module.train(args)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
