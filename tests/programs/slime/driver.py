"""``python train.py --trainer slime`` on a CPU: the loop is ours, the manager, placement groups, Megatron actors and
weight updates are slime's.

python -m tests.programs.slime.driver DIRECTORY STEPS embedded|router [CHECKPOINT to load]
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path

import ray

from agl_slime.cli.main import main as command_line
from agl_slime.engine.process import EmbeddedEngine
from agl_slime.report.read import RunReader
from agl_slime.tools.pages.file import write_report
from agl_slime.tools.rehearse.megatron.__main__ import prepare
from agl_slime.tools.rehearse.megatron.flags import model_flags, train_flags
from agl_slime.tools.slime_dumps.runs import SlimeRuns
from tests.harness.routers import sglang_router
from tests.harness.slime_programs import report
from tests.programs.slime.common import answer_of, as_flags, make_policy, start_ray

ACTOR = "agl_slime.tools.rehearse.megatron.actor.MegatronTrainRayActor"


def main(directory: Path, steps: int, engines: str, *loaded: str) -> None:
    prepare()
    model, dump = make_policy(directory), directory / "dump"
    (settings := directory / "agl.yaml").write_text(f"agl_actor_cls: {ACTOR}\n")
    with ExitStack() as stack:
        workers = [stack.enter_context(EmbeddedEngine(model)).url for _ in range(2 if engines == "router" else 1)]
        url = stack.enter_context(sglang_router(workers)) if engines == "router" else workers[0]
        start_ray(num_gpus=1, setup_hook="agl_slime.tools.rehearse.actor.register_worker")
        stack.callback(ray.shutdown)
        flags = {"num-iterations": steps, "rollout-batch-size": 8, "n-samples-per-prompt": 4, "eval-interval": 0}
        flags |= {"actor-num-nodes": 1, "actor-num-gpus-per-node": 1, "rollout-num-gpus": len(workers)}  # choose slime
        flags |= {"sglang-url": url, "model-path": model, "output-dir": directory / "run"}
        slimes = {"num-gpus-per-node": 1, "custom-config-path": settings, "rollout-max-response-len": 48}
        slimes |= {"save": directory / "checkpoint", "save-interval": steps}
        slimes |= {"use-kl-loss": "", "update-weight-disk-keep-files": ""}  # by a coefficient of 0
        slimes |= {"load": loaded[0]} if loaded else {}
        ours = ["train", *as_flags(flags), "--overwrite", "--"]
        code = command_line([*ours, *model_flags(model), *train_flags(model, dump), *as_flags(slimes)])
        lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
        run = RunReader(directory / "run")
        page, dumped = run.update() or {}, RunReader(dump, SlimeRuns(model)).update() or {}
        write_report([directory / "run"])
        report(
            {
                "code": code,
                "page": [page["state"]["word"], page["damage"]],
                "kept": [json.loads(run.rollout(name) or b"")["outcome"] for name in page["kept"]],
                "trained_equals_sampled": all(
                    line["train/tokens_trained"] == line["rollout/tokens_sampled"] for line in lines
                ),
                "iterations": [line["iteration"] for line in lines],
                "rewards": dumped["metrics"]["columns"]["rollout/reward_mean"],
                "logprob_diff_max": dumped["metrics"]["columns"]["train/logprob_diff_max"],
                "versions": [answer_of(worker, "model_info")["weight_version"] for worker in workers],
                "sampled": [answer_of(worker, "server_info")["tokens_sampled"] for worker in workers],
                "checkpoint": sorted(path.name for path in (directory / "checkpoint").iterdir()),
                "files": sorted(path.name for path in (directory / "run").iterdir()),
            }
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
