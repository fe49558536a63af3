"""Parts of several programs: a policy, tasks, slime's arguments, Ray."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import urllib.request
from pathlib import Path
from typing import Any

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.cli.demo.agent import LookupAgent
from agl_slime.cli.slime import HOOK_FLAGS, NORMALIZE_FLAGS
from agl_slime.tools.rehearse.megatron.flags import as_flags, model_flags


def make_policy(directory: Path) -> Path:
    """The lookup agent's tiny policy, made once per directory."""
    return Path(shutil.copytree(LOOKUP_POLICY, directory / "policy", dirs_exist_ok=True))


def write_tasks(path: Path, n: int, *, seed: int = 0) -> Path:
    rng = random.Random(seed)
    agent = LookupAgent()
    path.write_text("".join(json.dumps(agent.make_task(rng)) + "\n" for _ in range(n)))
    return path


def sizes(*, steps: int, groups: int, size: int) -> dict[str, object]:
    batch = {"num-rollout": steps, "rollout-batch-size": groups, "n-samples-per-prompt": size}
    return {**batch, "global-batch-size": groups * size, "micro-batch-size": 1, "rollout-max-response-len": 48}


def weights_by_disk(directory: Path) -> dict[str, object]:
    mode = {"update-weight-mode": "full", "update-weight-transport": "disk"}
    return {**mode, "update-weight-disk-dir": directory / "weights"}


def slime_args(flags: list[str], *, model: Path, config: dict[str, Any], directory: Path) -> Any:
    """slime's own ``parse_args`` on a command line, with ``config`` as its ``--custom-config-path``."""
    import yaml
    from slime.utils.arguments import parse_args

    settings = directory / "agl.yaml"
    settings.write_text(yaml.safe_dump(config))
    sizes = {"actor-num-nodes": 1, "actor-num-gpus-per-node": 1, "num-gpus-per-node": 1}
    ours: dict[str, object] = {"hf-checkpoint": model, "custom-config-path": settings, "advantage-estimator": "grpo"}
    hooks = [*HOOK_FLAGS, *NORMALIZE_FLAGS]
    sys.argv = ["train.py", *model_flags(model), *as_flags(sizes), *as_flags(ours), *hooks, *flags]
    return parse_args()


def figures(metrics: Path, directory: Path, workers: list[str]) -> dict[str, Any]:
    """Of a run: the metrics of the CPU actor, the engines' weight versions, the files of the checkpoint."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return {
        "steps": [line["step"] for line in lines],
        "rewards": [round(line["reward"], 3) for line in lines],
        "logprob_diff_max": [round(line["train/logprob_diff_max"], 6) for line in lines],
        "versions": [answer_of(worker, "model_info")["weight_version"] for worker in workers],
        "checkpoint": sorted(path.name for path in (directory / "checkpoint").glob("*")),
    }


def answer_of(worker: str, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{worker}/{path}", timeout=10) as answer:
        return json.load(answer)


def start_ray(*, num_gpus: int = 0, setup_hook: str | None = None) -> None:
    """Start a Ray of one node, or connect to the one of several hosts that ``TEST_RAY_ADDRESS`` names."""
    import ray

    settings: dict[str, Any] = {"log_to_driver": True}
    if setup_hook is not None:
        settings["runtime_env"] = {"worker_process_setup_hook": setup_hook}
    if address := os.environ.get("TEST_RAY_ADDRESS"):
        ray.init(address=address, **settings)
    else:  # "local": not a cluster that runs on this machine
        resources = {"num_cpus": 4, "num_gpus": num_gpus, "object_store_memory": 150_000_000}
        ray.init(address="local", include_dashboard=False, **resources, **settings)
