"""Does the default run learn, on every seed? Runs ``train.py`` once per seed and prints start, end and seconds.

    python benchmarks/learning.py --seeds 10

*start* is the mean training reward of the first iteration, *end* the mean over the last five, *first ≥ 0.85* the
iteration that reached it. *train s* is the time of the whole command, imports and the making of the policy included.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean, median

from rich.console import Console
from rich.table import Table

from agl_slime.report import read_metrics

GOAL = 0.85
REPO = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="how many seeds, from --first-seed on")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--agent", default="agl_slime.cli.demo.agent:LookupAgent")
    parser.add_argument("rest", nargs="*", help="further flags for train.py, after --")
    options = parser.parse_args()
    table = Table(title=f"{options.agent}, load average {os.getloadavg()[0]:.1f} at the start, {os.cpu_count()} cores")
    for column in (
        "seed",
        "start",
        "end",
        "best",
        f"first ≥ {GOAL}",
        "s to it",
        "whole s",
        "max log-prob diff",
        "ratio dev",
    ):
        table.add_column(column, justify="right")
    console = Console(width=120)
    ends, seconds = [], []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        with tempfile.TemporaryDirectory() as directory:
            flags = [
                "--agent",
                options.agent,
                "--seed",
                str(seed),
                "--output-dir",
                directory,
                "--view",
                "lines",
                "--eval-interval",
                "0",
                *options.rest,
            ]
            began = time.monotonic()
            done = subprocess.run(
                [sys.executable, "train.py", *flags], cwd=REPO, capture_output=True, text=True, check=False
            )
            took = time.monotonic() - began
            if done.returncode != 0:
                console.print(f"seed {seed}: train.py ended with {done.returncode}: {done.stderr.strip()[-500:]}")
                return 1
            lines = read_metrics(Path(directory) / "metrics.jsonl")
        rewards = [line["rollout/reward_mean"] for line in lines]
        reached = next((index for index, reward in enumerate(rewards) if reward >= GOAL), None)
        before = took - sum(line["perf/iteration_s"] for line in lines)
        to_goal = None if reached is None else before + sum(line["perf/iteration_s"] for line in lines[: reached + 1])
        ends.append(fmean(rewards[-5:]))
        seconds.append(took)
        table.add_row(
            str(seed),
            f"{rewards[0]:.2f}",
            f"{ends[-1]:.3f}",
            f"{max(rewards):.3f}",
            "never" if reached is None else str(reached + 1),
            "" if to_goal is None else f"{to_goal:.1f}",
            f"{took:.1f}",
            f"{lines[0]['train/logprob_diff_max']:.1e}",
            f"{lines[0]['train/first_ratio_dev_max']:.1e}",
        )
        console.print(f"seed {seed}: {rewards[0]:.2f} -> {ends[-1]:.3f} in {took:.1f} s")
    console.print(table)
    good = sum(end >= GOAL for end in ends)
    console.print(
        f"{good} of {len(ends)} seeds end at {GOAL} or above; median {median(ends):.3f}, "
        f"median time {median(seconds):.1f} s"
    )
    return 0 if good == len(ends) else 1


if __name__ == "__main__":
    sys.exit(main())
