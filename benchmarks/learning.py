"""Does the default run learn, on every seed? Runs ``train.py`` once per seed and prints start, end and seconds.

    python benchmarks/learning.py --seeds 10

*start* is the mean training reward of the first iteration, *end* the mean over the last five, *first ≥ 0.85* the
iteration that reached it. *train s* is the time of the whole command, imports and the making of the policy included.
"""

from __future__ import annotations

import argparse
import itertools
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
from agl_slime.support.intervals import estimate

GOAL = 0.85
REPO = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="how many seeds, from --first-seed on")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--agent", default="agl_slime.cli.demo.agent:LookupAgent")
    parser.add_argument("rest", nargs="*", help="further flags for train.py, after --")
    parser.add_argument("--until", type=float, help="stop at this validation reward, and count what it took")
    parser.add_argument("--variants", nargs="+", default=[""], help="with --until: flags that are compared, in quotes")
    options = parser.parse_args()
    if options.until is not None:
        return compare(options)
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


def compare(options: argparse.Namespace) -> int:
    """Rollouts and sampled tokens until the held-out reward is reached, for each variant; the variants in turns."""
    console, table = Console(width=140), Table(title=f"until {options.until} on held-out tasks, {options.agent}")
    columns = ("variant", "seeds", "rollouts", "sampled tokens", "without gradient", "not reached")
    for column in columns:
        table.add_column(column)
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    lines: dict[str, list[tuple[float, float, float, bool]]] = {variant: [] for variant in options.variants}
    for seed, variant in itertools.product(seeds, options.variants):
        with tempfile.TemporaryDirectory() as directory:
            lines[variant].append(line := run_until(options, variant, seed, Path(directory)))
        text = f"{line[0]:.0f} rollouts, {line[1]:.0f} tokens, {line[2]:.2f} without gradient"
        load = os.getloadavg()[0]
        console.print(f"{variant or 'default'}, seed {seed}: {text}, reached: {line[3]}, load {load:.1f}")
    for variant, of_seeds in lines.items():
        cells = []
        for values in list(zip(*of_seeds, strict=True))[:3]:
            interval = estimate([*values], rewards=[])
            bounds = "" if interval is None or interval.low is None else f" ({interval.low:.3g} to {interval.high:.3g})"
            cells.append(f"{fmean(values):.3g}{bounds}")
        table.add_row(variant or "default", str(len(seeds)), *cells, str(sum(not line[3] for line in of_seeds)))
    console.print(table)
    return 0


def run_until(
    options: argparse.Namespace, variant: str, seed: int, directory: Path
) -> tuple[float, float, float, bool]:
    """Rollouts, sampled tokens and the share of these without gradient; and whether the reward was reached."""
    flags = ["--agent", options.agent, "--seed", str(seed), "--output-dir", str(directory), "--view", "lines"]
    command = [sys.executable, "train.py", *flags, *variant.split(), *options.rest]
    with (directory / "log").open("w") as log, subprocess.Popen(command, cwd=REPO, stdout=log, stderr=log) as process:
        path = directory / "metrics.jsonl"

        def rewards() -> list[float]:
            rows = read_metrics(path) if path.exists() else []
            return [row["val/reward_mean"] for row in rows if row.get("val/reward_mean") is not None]

        while process.poll() is None and max(rewards(), default=0.0) < options.until:
            time.sleep(0.5)
        process.terminate()
    rollouts, tokens, empty = 0.0, 0.0, 0.0
    for row in read_metrics(path):
        sampled = row["rollout/response_tokens_mean"] * row["rollout/count"]
        rollouts, tokens = rollouts + row["rollout/count"], tokens + sampled
        empty += sampled * row.get("rollout/no_gradient", 0.0)
        if (row.get("val/reward_mean") or 0.0) >= options.until:
            return rollouts, tokens, empty / tokens, True
    return rollouts, tokens, empty / tokens, False


if __name__ == "__main__":
    sys.exit(main())
