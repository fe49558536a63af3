"""slime's own ``train()`` or ``train_async()`` on a CPU: real Ray, manager, router, weight updates and SGLang; only
Megatron's place is taken by our trainer.

    python -m tests.programs.slime.loop DIRECTORY train|train_async STEPS embedded|ray|hosts URL|URL...

The URLs name running SGLang servers that serve DIRECTORY/policy; ``hosts`` has runners on other nodes
of the Ray of several hosts that ``TEST_RAY_ADDRESS`` names. ``ray`` is the embedded engine with the agent in two Ray
actors that the manager starts, in small batches.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import ray

from agl_slime.engine.process import EmbeddedEngine
from agl_slime.slime_hooks import log_eval_rollout
from tests.harness.routers import sglang_router
from tests.harness.slime_programs import report
from tests.programs.slime.common import (
    as_flags,
    figures,
    make_policy,
    sizes,
    slime_args,
    start_ray,
    weights_by_disk,
    write_tasks,
)

GROUPS, SIZE, SMALL, EVALUATED = 16, 4, 2, 8


def main(directory: Path, loop: str, steps: int, engines: list[str]) -> None:
    model = make_policy(directory)
    if engines[0] == "hosts":
        run(directory, model, loop, steps, engines[1:], runners="ray:2", host=os.environ["SLIME_HOST_IP"])
    elif engines in (["embedded"], ["ray"]):
        with EmbeddedEngine(model) as engine:
            run(directory, model, loop, steps, [engine.url], runners="ray:2" if engines == ["ray"] else None)
    else:
        run(directory, model, loop, steps, engines)


def run(
    directory: Path,
    model: Path,
    loop: str,
    steps: int,
    engines: list[str],
    *,
    runners: str | None = None,
    host: str = "127.0.0.1",
) -> None:
    groups = SMALL if runners else GROUPS
    from tests.programs.slime.cpu import CpuTrainActor, register_cpu

    register_cpu()
    metrics = directory / "metrics.jsonl"
    with sglang_router(host=host) as address:
        flags = sizes(steps=steps, groups=groups, size=SIZE) | weights_by_disk(directory)
        flags |= {"rollout-temperature": 1.0, "update-weight-disk-keep-files": ""}
        flags |= {"rollout-external-engine-addrs": " ".join(url.removeprefix("http://") for url in engines)}
        flags |= {"sglang-router-ip": host, "sglang-router-port": address.rpartition(":")[2]}
        dumps = directory / "dump" / "rollout_data" / "{rollout_id}.pt"
        flags |= {"save": directory / "checkpoint", "save-interval": steps, "save-debug-rollout-data": dumps}
        flags |= {"custom-eval-rollout-log-function-path": "tests.programs.slime.loop.log_eval"}
        tasks = str(write_tasks(directory / "tasks.jsonl", 4000))
        config: dict[str, Any] = {"agl_agent": "agl_slime.cli.demo.agent:LookupAgent", "agl_tasks": tasks}
        config |= {"eval_interval": steps, "agl_eval_rollouts": EVALUATED, "agl_get_timeout_s": 120}
        config |= {"agl_metrics": str(metrics), "agl_eval_log": str(directory / "evals.jsonl")}
        if runners:
            config |= {"agl_runners": runners}
        else:  # else make_task has them
            config["agl_eval_tasks"] = str(write_tasks(directory / "eval.jsonl", 64, seed=99))
        if host != "127.0.0.1":
            config |= {"agl_store_host": "0.0.0.0", "agl_max_staleness": int(loop == "train_async")}
        args = slime_args(as_flags(flags), model=model, config=config, directory=directory)
        module = slimes_script(loop)
        module.create_training_models = functools.partial(module.create_training_models, actor_cls=CpuTrainActor)
        start_ray(num_gpus=1, setup_hook="tests.programs.slime.cpu.register_cpu")
        try:
            module.train(args)
            pids = gone("Worker", "RolloutManager")
        finally:
            ray.shutdown()
        evals = [json.loads(line) for line in (directory / "evals.jsonl").read_text().splitlines()]
        weights = [path.name for path in (directory / "weights").iterdir()]
        report({**figures(metrics, directory, engines), "actors": pids, "evals": evals, "weights": weights})


def gone(*names: str) -> dict[str, int]:
    """The numbers of actors of these classes that do not end: Ray kills them asynchronously."""
    psutil.wait_procs([process for name in names for process in actors(name)], timeout=20)
    return {name: len(actors(name)) for name in names}


def actors(name: str) -> list[psutil.Process]:
    """Processes of this Ray that are an actor of this class."""
    session = [process for process in psutil.process_iter(["name"]) if os.getsid(process.pid) == os.getsid(0)]
    return [process for process in session if (process.info["name"] or "").startswith(f"ray::{name}")]


def slimes_script(name: str) -> Any:
    """slime's ``train.py`` or ``train_async.py``, which lie beside its package (our repository has a train.py of its
    own)."""
    import slime

    path = Path(next(iter(slime.__path__))).parent / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"slime_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def log_eval(rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: dict[str, Any] | None) -> bool:
    rewards = {name: entry["rewards"] for name, entry in data.items()}
    with open(args.agl_eval_log, "a") as lines:
        lines.write(json.dumps(rewards) + "\n")
    return log_eval_rollout(rollout_id, args, data, extra_metrics)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:])
