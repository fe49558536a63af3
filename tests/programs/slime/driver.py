"""``python train.py --trainer slime`` on a CPU: the loop is ours, the manager, placement groups, actors' group and
weight updates are slime's.

python -m tests.programs.slime.driver DIRECTORY STEPS embedded|router [CHECKPOINT to load]
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import ray
import yaml

from agl_slime.cli.main import main as command_line
from agl_slime.engine.process import EmbeddedEngine
from agl_slime.report.page import write_report
from agl_slime.report.read import RunReader
from agl_slime.tools.rehearse.megatron.flags import model_flags
from tests.harness.routers import sglang_router
from tests.harness.slime_programs import report
from tests.programs.slime.common import answer_of, as_flags, figures, make_policy, start_ray, weights_by_disk


def main(directory: Path, steps: int, engines: str, *loaded: str) -> None:
    from tests.programs.slime.cpu import register_cpu

    register_cpu()
    model = make_policy(directory)
    metrics = directory / "metrics.jsonl"
    settings = directory / "agl.yaml"
    actor = "tests.programs.slime.cpu.CpuTrainActor"
    settings.write_text(yaml.safe_dump({"agl_actor_cls": actor, "agl_metrics": str(metrics)}))
    with ExitStack() as stack:
        workers = [stack.enter_context(EmbeddedEngine(model)).url for _ in range(2 if engines == "router" else 1)]
        url = stack.enter_context(sglang_router(workers)) if engines == "router" else workers[0]
        start_ray(num_gpus=1, setup_hook="tests.programs.slime.cpu.register_cpu")
        stack.callback(ray.shutdown)
        flags = {"num-iterations": steps, "rollout-batch-size": 16, "n-samples-per-prompt": 4, "eval-interval": 0}
        flags |= {"actor-num-nodes": 1, "actor-num-gpus-per-node": 1, "rollout-num-gpus": len(workers)}  # choose slime
        flags |= {"sglang-url": url, "model-path": model, "output-dir": directory / "run"}
        slimes = {"num-gpus-per-node": 1, "micro-batch-size": 1, "custom-config-path": settings}
        slimes |= {**weights_by_disk(directory), "save": directory / "checkpoint", "save-interval": steps}
        slimes |= {"load": loaded[0]} if loaded else {}
        ours = ["train", *as_flags(flags), "--overwrite", "--"]
        code = command_line([*ours, *model_flags(model), *as_flags(slimes)])
        lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
        run = RunReader(directory / "run")
        page = run.update() or {}
        write_report([directory / "run"])
        report(
            {
                **figures(metrics, directory, workers),
                "code": code,
                "page": [page["state"]["word"], page["damage"]],
                "kept": [json.loads(run.rollout(name) or b"")["outcome"] for name in page["kept"]],
                "trained_equals_sampled": all(
                    line["train/tokens_trained"] == line["rollout/tokens_sampled"] for line in lines
                ),
                "iterations": [line["iteration"] for line in lines],
                "sampled": [answer_of(worker, "server_info")["tokens_sampled"] for worker in workers],
                "files": sorted(path.name for path in (directory / "run").iterdir()),
            }
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
