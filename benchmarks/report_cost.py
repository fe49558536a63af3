"""Cost of kept rollouts: CPU time of the reporters' thread, against the run's time.

    python -m benchmarks.report_cost [--iterations 40]

Trains the agent of the first command with each --keep-rollouts, and measures the processor time of the calls of
RolloutWriter (its thread's clock), the run's seconds of iterations, and the size of the files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from agl_slime.cli.local import run_training
from agl_slime.cli.settings import train_config
from agl_slime.report.files import iter_jsonl
from agl_slime.report.rollouts import RolloutWriter
from agl_slime.runner.process import configure_worker_process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=40)
    arguments = parser.parse_args()
    configure_worker_process()
    spent = 0.0
    handle = RolloutWriter.handle

    def timed(self: RolloutWriter, event: Any) -> None:
        nonlocal spent
        began = time.thread_time()
        handle(self, event)
        spent += time.thread_time() - began

    RolloutWriter.handle = timed  # type: ignore[method-assign]
    for keep in ("none", "sampled", "all"):
        spent, path = 0.0, Path(tempfile.mkdtemp()) / keep
        config = train_config(num_iterations=arguments.iterations, keep_rollouts=keep, output_dir=path, eval_interval=0)
        asyncio.run(run_training(config, console=Console(file=open("/dev/null", "w"))))  # noqa: SIM115
        wall = sum(row["perf/iteration_s"] for row in iter_jsonl(path / "metrics.jsonl"))
        files = [path / "groups.jsonl", path / "rollouts.jsonl"]
        sizes = {file.stem: file.stat().st_size for file in files if file.exists()}
        told = {"keep": keep, "iterations_s": round(wall, 2), "writer_cpu_s": round(spent, 3), "bytes": sizes}
        print(json.dumps({**told, "share": round(spent / wall, 4)}), flush=True)


if __name__ == "__main__":
    main()
