"""``python train.py --trainer slime`` on a CPU: the loop is ours, the manager, placement groups, actors' group and
weight updates are slime's.

python -m tests.programs.slime.driver DIRECTORY STEPS embedded|router [CHECKPOINT to load]
python -m tests.programs.slime.driver DIRECTORY STEPS hosts URL STALENESS

``hosts`` is a run with runners on other nodes of the Ray of several hosts that ``TEST_RAY_ADDRESS`` names, in small
batches, with the engine at URL.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
import requests
import yaml

from agl_slime.cli.main import main as command_line
from agl_slime.engine.process import EmbeddedEngine
from agl_slime.report.page import write_report
from agl_slime.report.read import RunReader
from tests.harness.routers import sglang_router
from tests.harness.slime_programs import model_flags, report
from tests.programs.slime.common import make_policy, start_ray


def main(directory: Path, steps: int, engines: str, *loaded: str) -> None:
    from tests.programs.slime.cpu import register_cpu

    register_cpu()
    model = make_policy(directory)
    metrics = directory / "metrics.jsonl"
    settings = directory / "agl.yaml"
    settings.write_text(
        yaml.safe_dump({"agl_actor_cls": "tests.programs.slime.cpu.CpuTrainActor", "agl_metrics": str(metrics)})
    )
    flags = ["--rollout-batch-size", "16"]
    with ExitStack() as stack:
        if engines == "hosts":
            url, staleness = loaded
            loaded, workers = (), [url]
            flags = ["--rollout-batch-size", "2", "--max-staleness", staleness]
            flags += ["--runners", "ray:2", "--store-host", "0.0.0.0"]
        else:
            workers = [stack.enter_context(EmbeddedEngine(model)).url for _ in range(2 if engines == "router" else 1)]
            url = workers[0]
        if engines == "router":
            url = stack.enter_context(sglang_router(workers))
        start_ray(num_gpus=1, setup_hook="tests.programs.slime.cpu.register_cpu")
        stack.callback(ray.shutdown)
        code = command_line(
            [
                *("train", "--trainer", "slime", "--sglang-url", url, "--model-path", str(model)),
                *("--num-iterations", str(steps)),
                *(*flags, "--n-samples-per-prompt", "4", "--eval-interval", "0"),
                *("--output-dir", str(directory / "run"), "--overwrite", "--"),
                *model_flags(model),
                *("--num-gpus-per-node", "1", "--micro-batch-size", "1", "--custom-config-path", str(settings)),
                *("--update-weight-mode", "full", "--update-weight-transport", "disk"),
                *("--update-weight-disk-dir", str(directory / "weights")),
                *("--save", str(directory / "checkpoint"), "--save-interval", str(steps)),
                *(("--load", *loaded) if loaded else ()),
            ]
        )
        lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        ours = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
        run = RunReader(directory / "run")
        page = run.update() or {}
        write_report([directory / "run"])
        report(
            {
                "code": code,
                "page": [page["state"]["word"], page["damage"]],
                "kept": [json.loads(run.rollout(name) or b"")["outcome"] for name in page["kept"]],
                "trained_equals_sampled": all(
                    line["train/tokens_trained"] == line["rollout/tokens_sampled"] for line in ours
                ),
                "steps": [line["step"] for line in lines],
                "iterations": [line["iteration"] for line in ours],
                "rewards": [round(line["reward"], 3) for line in lines],
                "versions": [answer_of(worker, "model_info")["weight_version"] for worker in workers],
                "sampled": [answer_of(worker, "server_info")["tokens_sampled"] for worker in workers],
                "logprob_diff_max": [round(line["train/logprob_diff_max"], 6) for line in lines],
                "checkpoint": sorted(path.name for path in (directory / "checkpoint").glob("*")),
                "files": sorted(path.name for path in (directory / "run").iterdir()),
            }
        )


def answer_of(worker: str, path: str) -> dict[str, Any]:
    return requests.get(f"{worker}/{path}", timeout=10).json()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
