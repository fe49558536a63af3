"""What the programs share: a policy, tasks, slime's arguments, Ray."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.cli.demo.agent import LookupAgent
from tests.harness.slime_programs import model_flags


def make_policy(directory: Path) -> Path:
    """The lookup agent's tiny policy, made once per directory."""
    return Path(shutil.copytree(LOOKUP_POLICY, directory / "policy", dirs_exist_ok=True))


def write_tasks(path: Path, n: int, *, seed: int = 0) -> Path:
    rng = random.Random(seed)
    agent = LookupAgent()
    path.write_text("".join(json.dumps(agent.make_task(rng)) + "\n" for _ in range(n)))
    return path


def slime_args(flags: list[str], *, model: Path, config: dict[str, Any], directory: Path) -> Any:
    """slime's own ``parse_args`` on a command line, with ``config`` as its ``--custom-config-path``."""
    import yaml
    from slime.utils.arguments import parse_args

    settings = directory / "agl.yaml"
    settings.write_text(yaml.safe_dump(config))
    hooks = "agl_slime.slime_hooks"
    sys.argv = [
        "train.py",
        *model_flags(model),
        *("--hf-checkpoint", str(model)),
        *("--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1", "--num-gpus-per-node", "1"),
        *("--advantage-estimator", "grpo"),
        *("--data-source-path", "agl_slime.AGLDataSource"),
        *("--rollout-function-path", f"{hooks}.generate_rollout"),
        *("--custom-reward-post-process-path", f"{hooks}.normalize_rewards"),
        *("--custom-rollout-log-function-path", f"{hooks}.log_rollout"),
        *("--custom-eval-rollout-log-function-path", f"{hooks}.log_eval_rollout"),
        *("--custom-config-path", str(settings)),
        *flags,
    ]
    return parse_args()


def start_ray(*, num_gpus: int = 0, setup_hook: str | None = None) -> None:
    """Start a Ray of one node, or connect to the one of several hosts that ``TEST_RAY_ADDRESS`` names."""
    import ray

    runtime_env = {"worker_process_setup_hook": setup_hook} if setup_hook is not None else None
    if address := os.environ.get("TEST_RAY_ADDRESS"):
        ray.init(address=address, log_to_driver=True, runtime_env=runtime_env)
        return
    ray.init(
        address="local",  # not a cluster that runs on this machine
        num_cpus=4,
        num_gpus=num_gpus,
        include_dashboard=False,
        object_store_memory=150_000_000,
        log_to_driver=True,
        runtime_env=runtime_env,
    )
