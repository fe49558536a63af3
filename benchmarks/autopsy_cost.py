"""The engine's time for the autopsy of a run, ``train.py --autopsy N``.

    python -m benchmarks.autopsy_cost [--turns 0,1,8] [--iterations 10] [--repeats 3]

The tiny policy trains on its lookup task with the default batch. *engine* is the CPU time of the embedded engine's
process from the first to the last iteration, *scoring* the part of it that passes while turns are scored again; the
engine has no other work then. Cases alternate; figures are means over the repeats. The limit is 2 % of the engine's
time.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from agl_slime.cli.demo import LOOKUP_POLICY
from agl_slime.cli.local import run_training
from agl_slime.cli.settings import train_config
from agl_slime.engine import EmbeddedEngine
from agl_slime.engine.scoring import ScoringClient
from benchmarks.common import console

LIMIT = 0.02


def cpu_ns(process: psutil.Process) -> int:
    """CPU time of all threads of the process, from the scheduler's statistics, which count nanoseconds."""
    tasks = Path(f"/proc/{process.pid}/task")
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir())


def run(turns: int, iterations: int, seed: int) -> tuple[float, float]:
    """Seconds of the engine's CPU in all, and for scoring."""
    spent = 0
    with EmbeddedEngine(LOOKUP_POLICY) as engine, tempfile.TemporaryDirectory() as directory:
        process = next(
            child for child in psutil.Process().children(recursive=True) if "agl_slime.engine" in child.cmdline()
        )
        score = ScoringClient.score

        async def counted(*args: Any) -> Any:
            nonlocal spent
            before = cpu_ns(process)
            try:
                return await score(*args)
            finally:
                spent += cpu_ns(process) - before

        ScoringClient.score = counted  # type: ignore[method-assign]
        config = train_config(
            model_path=LOOKUP_POLICY,
            sglang_url=engine.url,
            num_iterations=iterations,
            eval_interval=0,
            keep_rollouts="none",
            autopsy=turns,
            seed=seed,
            output_dir=Path(directory) / "run",
        )
        try:
            before = cpu_ns(process)
            asyncio.run(run_training(config, console=Console(file=io.StringIO()), torch_threads=1))
            return (cpu_ns(process) - before) / 1e9, spent / 1e9
        finally:
            ScoringClient.score = score  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", default="0,1,8")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    cases = [int(text) for text in args.turns.split(",")]
    times: dict[int, list[tuple[float, float]]] = {turns: [] for turns in cases}
    for seed in range(args.repeats):
        for turns in cases:
            times[turns].append(run(turns, args.iterations, seed))
    table = Table("--autopsy", "engine, s", "scoring, s", "share", "limit")
    for turns, pairs in times.items():
        engine, scoring = (fmean(values) for values in zip(*pairs, strict=True))
        table.add_row(str(turns), f"{engine:.2f}", f"{scoring:.3f}", f"{scoring / engine:.2%}", f"{LIMIT:.0%}")
    console.print(table)


if __name__ == "__main__":
    main()
