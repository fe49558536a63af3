"""What ``--trainer slime`` gains by ``--max-staleness``, beside the most that there is to gain.

    export SLIME_DIR=… PYTHONPATH=agl_slime/tools/rehearse/standins:$SLIME_DIR:.
    python benchmarks/overlap_slime.py [--ratios 1:1,2:1,1:2]

slime's RolloutManager, placement groups, actors' group and weight update are real, under Ray; so are the loop, the
store service, runner, agents and conversion. The engine takes set times for answers and updates, the actor for a step.
Times and ceiling as in ``benchmarks/overlap.py``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ray
import yaml
from rich.console import Console
from rich.table import Table

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.cli.local import run_training
from agl_slime.cli.settings import train_config
from agl_slime.cli.wiring import RunInputs
from agl_slime.tools.rehearse.megatron.flags import model_flags
from benchmarks.common import console, question, question_agent, scripted_engine
from tests.programs.slime.common import start_ray
from tests.programs.slime.cpu import register_cpu

GROUPS, SIZE = 8, 4


def measure(
    *, roll_s: float, train_s: float, sync_s: float, staleness: int, iterations: int, warm_up: int
) -> list[dict[str, Any]]:
    """The metrics of ``iterations`` after ``warm_up`` of them, in which processes start and the pipeline fills."""
    with (
        tempfile.TemporaryDirectory() as place,
        scripted_engine(latency_s=roll_s / 2, slots=GROUPS * SIZE // 2, update_s=sync_s) as url,
    ):
        directory = Path(place)
        settings = directory / "agl.yaml"
        settings.write_text(
            yaml.safe_dump({"agl_actor_cls": "benchmarks.slime_actor.SleepingActor", "agl_train_s": train_s})
        )
        config = train_config(
            trainer="slime", sglang_url=url, model_path=LOOKUP_POLICY, num_iterations=warm_up + iterations,
            rollout_batch_size=GROUPS, n_samples_per_prompt=SIZE, eval_interval=0, output_dir=directory / "run",
            max_staleness=staleness, keep_rollouts="none",
        )  # fmt: skip
        flags = [
            *model_flags(LOOKUP_POLICY),
            *("--num-gpus-per-node", "1", "--micro-batch-size", "1", "--custom-config-path", str(settings)),
            *("--update-weight-mode", "full", "--update-weight-transport", "disk"),
            *("--update-weight-disk-dir", str(directory / "weights")),
        ]
        parts = RunInputs(agent=question_agent(), tasks=[{"prompt": question(n)} for n in range(200)])
        asyncio.run(run_training(config, slime_flags=flags, program_inputs=parts, console=Console(quiet=True)))
        rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/tokens_trained"] > 0 for row in rows] == [True] * (warm_up + iterations)
    return rows[warm_up:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", default="2:1,1:1,1:2", help="time of the engine to time of training")
    parser.add_argument("--staleness", default="1,2")
    parser.add_argument("--longer", type=float, default=2.0, help="seconds of the longer side")
    parser.add_argument("--sync", type=float, default=0.1, help="seconds that an update takes the engine")
    parser.add_argument("--iterations", type=int, default=8, help="that are measured")
    parser.add_argument("--warm-up", type=int, default=4, help="iterations before those")
    options = parser.parse_args()
    register_cpu()
    start_ray(num_gpus=1, setup_hook="tests.programs.slime.cpu.register_cpu")
    times, gains = ("engine : training", "t_roll", "t_train", "t_sync"), ("speed-up", "ceiling", "of it")
    table = Table(*times, "staleness", "s per iteration", *gains, "behind, mean / most")
    for ratio in options.ratios.split(","):
        roll, train = map(float, ratio.split(":"))
        unit = options.longer / max(roll, train)
        about = {
            "roll_s": roll * unit,
            "train_s": train * unit,
            "sync_s": options.sync,
            "iterations": options.iterations,
            "warm_up": options.warm_up,
        }
        serial = measure(staleness=0, **about)
        t_roll, t_train, t_sync = (
            fmean(row[f"perf/{name}_s"] for row in serial) for name in ("collect", "train", "sync")
        )
        ceiling = (t_roll + t_train + t_sync) / (max(t_roll, t_train) + t_sync)
        in_turn = fmean(row["perf/iteration_s"] for row in serial)
        table.add_row(
            ratio, *(f"{s:.3f}" for s in (t_roll, t_train, t_sync)), "0", f"{in_turn:.3f}", "1.00", f"{ceiling:.2f}"
        )
        for staleness in map(int, options.staleness.split(",")):
            rows = measure(staleness=staleness, **about)
            seconds = fmean(row["perf/iteration_s"] for row in rows)
            mean, most = (
                f([row[f"rollout/staleness_{n}"] for row in rows]) for f, n in ((fmean, "mean"), (max, "max"))
            )
            behind, gained = f"{mean:.2f} / {most}", in_turn / seconds
            figures = f"{seconds:.3f}", f"{gained:.2f}", f"{ceiling:.2f}", f"{gained / ceiling:.0%}", behind
            table.add_row("", "", "", "", str(staleness), *figures)
    ray.shutdown()
    console.print(table)


if __name__ == "__main__":
    main()
