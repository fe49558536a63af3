"""Does a student learn from its teacher's log-probs alone, in fewer rollouts than GRPO took from rewards?

    python -m benchmarks.teacher --runs DIR --seeds 5

*Teacher*: the tiny policy after GRPO of the first command (a clean run of ``benchmarks.onset``). *Student*: its start,
trained with ``--teacher-alone`` on the same tasks and settings. Held-out rewards are of 64 rollouts, every second
iteration; the goal is 90 % of the teacher's (mean of its last five validations), reached in the first of two in a row.
The last row has two teachers, seeds 0 and 1, each for the tasks of one ``source_name``.
``DIR`` keeps the runs: finished ones are not trained again.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from agl_slime.cli.demo.agent import LookupAgent
from agl_slime.engine.process import EmbeddedEngine
from agl_slime.report import read_metrics
from benchmarks.common import console
from benchmarks.onset import clean_run, trained

GOAL, EVERY, PER_ITERATION = 0.9, 2, 64
ITERATIONS = 20  # of a student


class SourcesAgent(LookupAgent):
    """The lookup task, half of it with the ``source_name`` odd."""

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        return {**super().make_task(rng), "source_name": rng.choice(("even", "odd"))}


def held_out(rows: Sequence[dict[str, Any]]) -> list[float]:
    """The rewards of validations, the first after ``EVERY`` iterations."""
    return [row["val/reward_mean"] for row in rows if "val/reward_mean" in row and row["iteration"] >= EVERY]


def rollouts_to(goal: float, rewards: Sequence[float]) -> int | None:
    """Training rollouts until the first of two validations in a row reaches ``goal``."""
    pairs = enumerate(pairwise(rewards), 1)
    return next((number * EVERY * PER_ITERATION for number, both in pairs if min(both) >= goal), None)


def student_run(directory: Path, teachers: dict[str, Path], *, seed: int, **settings: Any) -> list[dict[str, Any]]:
    """The metrics of the student's run with the models of ``teachers``, by source."""
    engines = {source: EmbeddedEngine(model) for source, model in teachers.items()}
    try:
        for engine in engines.values():
            engine.start()
        urls = tuple(f"{source}={engine.url}" if source else engine.url for source, engine in engines.items())
        settings |= {"num_iterations": ITERATIONS, "eval_interval": EVERY, "eval_rollouts": 64}
        trained(directory, teacher_url=urls, teacher_alone=True, seed=seed, **settings)
    finally:
        for engine in engines.values():
            engine.stop()
    return list(read_metrics(directory / "metrics.jsonl"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Does a student learn from its teacher alone?")
    parser.add_argument("--runs", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    began = time.monotonic()
    runs: Path = options.runs
    load = f"load average {os.getloadavg()[0]:.1f} at the start, {os.cpu_count()} cores"
    table = Table(title=f"rollouts to {GOAL:.0%} of the teacher's held-out reward, {load}")
    for column in ("seed", "teacher", "goal", "rollouts by GRPO", "with teacher", "student", "reverse KL"):
        table.add_column(column, justify="right")

    def tell(name: str, grpo: Sequence[Path], rows: Sequence[dict[str, Any]]) -> None:
        curves = [held_out(list(read_metrics(path / "metrics.jsonl"))) for path in grpo]
        rewards, ends = held_out(rows), [fmean(curve[-5:]) for curve in curves]
        goal, kl = GOAL * fmean(ends), [row["train/teacher_kl"] for row in rows]
        counts = [str(rollouts_to(goal, curve) or "never") for curve in curves]
        student = str(rollouts_to(goal, rewards) or "never")
        cells = (f"{fmean(ends):.3f}", f"{goal:.3f}", ", ".join(counts), student, f"{fmean(rewards[-5:]):.3f}")
        table.add_row(name, *cells, f"{kl[0]:.3f} to {fmean(kl[-5:]):.3f}")
        for curve in (*curves, rewards):
            console.print(name, *(f"{reward:.2f}" for reward in curve), highlight=False)

    clean = [clean_run(runs, seed) for seed in range(max(2, options.seeds))]
    for seed, grpo in enumerate(clean[: options.seeds]):
        tell(str(seed), [grpo], student_run(runs / f"student-{seed}", {"": grpo / "model"}, seed=seed))
    by_source = {"even": clean[0] / "model", "odd": clean[1] / "model"}
    rows = student_run(runs / "student-sources", by_source, seed=0, agent="benchmarks.teacher:SourcesAgent")
    tell("two", clean[:2], rows)
    console.print(table)
    console.print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
