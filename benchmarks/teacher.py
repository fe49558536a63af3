"""Does a student learn from its teacher's log-probs alone, in fewer rollouts than GRPO took from rewards?

    python -m benchmarks.teacher --runs DIR --seeds 5
    python -m benchmarks.teacher --runs DIR --seeds 5 --smollm2

*Teacher*: the tiny policy after GRPO of the first command (a clean run of ``benchmarks.onset``), 64 rollouts per step.
*Student*: its start, trained with ``--teacher-alone`` on the same tasks, in steps of 64 rollouts, and of 16 rollouts of
16 tasks, since it needs no groups. GRPO in steps of 16 (4 groups of 4) is beside it. Held-out rewards are of 64
rollouts. The goal is 90 % of the teacher's (mean of its last five validations), reached in the first of two validations
in a row. The last row has two teachers, seeds 0 and 1, each for the tasks of one ``source_name``.
With ``--smollm2``: SmolLM2-135M-Instruct on ``agents/reverse_text.py``, GRPO in steps of 128 rollouts (8 groups of 16),
the student in steps of 32 rollouts of 32 tasks.
``DIR`` keeps the runs: finished ones are not trained again.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterable, Sequence
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

GOAL = 0.9
LARGE = {"num_iterations": 20, "eval_interval": 2, "eval_rollouts": 64}
SMALL = {"num_iterations": 40, "eval_interval": 4, "eval_rollouts": 64}
GROUPS = {"rollout_batch_size": 4, "n_samples_per_prompt": 4}
SINGLE = {"rollout_batch_size": 16, "n_samples_per_prompt": 1}
REVERSE_TEXT = {
    "model_path": Path("smollm2"),
    "agent": "agents/reverse_text.py:ReverseText",
    "max_new_tokens": 16,
    "num_iterations": 20,
    "eval_interval": 2,
    "eval_rollouts": 64,
    "local.lr": 2e-5,
    "local.n_minibatches": 1,
}
Curve = list[tuple[int, float]]
"""Held-out rewards, each with the training rollouts before it."""


class SourcesAgent(LookupAgent):
    """The lookup task, half of it with the ``source_name`` odd."""

    def make_task(self, rng: random.Random) -> dict[str, Any]:
        return {**super().make_task(rng), "source_name": rng.choice(("even", "odd"))}


def held_out(rows: Iterable[dict[str, Any]], *, per_iteration: int = 64) -> Curve:
    """The curve of a run, without its start."""
    return [(n * per_iteration, row["val/reward_mean"]) for n, row in enumerate(rows, 1) if "val/reward_mean" in row]


def rollouts_to(goal: float, curve: Curve) -> str:
    """Training rollouts until the first of two validations in a row reaches ``goal``."""
    reached = (n for (n, reward), (_, later) in pairwise(curve) if min(reward, later) >= goal)
    return str(next(reached, "never"))


def student_run(directory: Path, teachers: dict[str, Path], *, seed: int, **settings: Any) -> list[dict[str, Any]]:
    """The metrics of the student's run with the models of ``teachers``, by source."""
    engines = {source: EmbeddedEngine(model) for source, model in teachers.items()}
    try:
        for engine in engines.values():
            engine.start()
        urls = tuple(f"{source}={engine.url}" if source else engine.url for source, engine in engines.items())
        trained(directory, teacher_url=urls, teacher_alone=True, seed=seed, **settings)
    finally:
        for engine in engines.values():
            engine.stop()
    return list(read_metrics(directory / "metrics.jsonl"))


def smollm2(runs: Path, seeds: int) -> None:
    table = Table(title=f"SmolLM2-135M, reverse-text: rollouts to {GOAL:.0%} of the teacher's, {load_text()}")
    for column in ("seed", "teacher's reward", "goal", "GRPO, 128", "teacher, 32", "reverse KL"):
        table.add_column(column, justify="right")
    for seed in range(seeds):
        sizes = {"rollout_batch_size": 8, "n_samples_per_prompt": 16}
        grpo = trained(runs / f"smollm2-grpo-{seed}", seed=seed, **REVERSE_TEXT, **sizes)
        curve = held_out(read_metrics(grpo / "metrics.jsonl"), per_iteration=128)
        end = fmean(reward for _, reward in curve[-5:])
        sizes = {"rollout_batch_size": 32, "n_samples_per_prompt": 1}
        of_32 = student_run(runs / f"smollm2-student-{seed}", {"": grpo / "model"}, seed=seed, **REVERSE_TEXT, **sizes)
        taught = held_out(of_32, per_iteration=32)
        kl = [row["train/teacher_kl"] for row in of_32]
        reached = (rollouts_to(GOAL * end, one) for one in (curve, taught))
        falls = f"{kl[0]:.3f} to {fmean(kl[-5:]):.3f}"
        table.add_row(str(seed), f"{end:.3f}", f"{GOAL * end:.3f}", *reached, falls)
        for name, one in (("GRPO", curve), ("student", taught)):
            console.print(seed, f"{name}:", *(f"{reward:.2f}" for _, reward in one), highlight=False)
    console.print(table)


def load_text() -> str:
    return f"load average {os.getloadavg()[0]:.1f} at the start, {os.cpu_count()} cores"


def tiny_policy(runs: Path, seeds: int) -> None:
    began = time.monotonic()
    table = Table(title=f"rollouts to {GOAL:.0%} of the teacher's held-out reward, {load_text()}")
    columns = ("GRPO, 64", "teacher, 64", "GRPO, 16", "teacher, 16")
    for column in ("seed", "teacher's reward", "goal", *columns, "reverse KL, 64", "reverse KL, 16"):
        table.add_column(column, justify="right")

    def tell(name: str, teacher: float, curves: Sequence[Curve], students: Sequence[list[dict[str, Any]]]) -> None:
        goal = GOAL * teacher
        kl = [[row["train/teacher_kl"] for row in rows] for rows in students]
        falls = [f"{one[0]:.3f} to {fmean(one[-5:]):.3f}" for one in kl]
        table.add_row(name, f"{teacher:.3f}", f"{goal:.3f}", *(rollouts_to(goal, curve) for curve in curves), *falls)
        for curve, column in zip(curves, columns, strict=True):
            console.print(name, f"{column}:", *(f"{reward:.2f}" for _, reward in curve), highlight=False)

    grpo = [clean_run(runs, seed) for seed in range(max(2, seeds))]
    curves = [held_out(read_metrics(path / "metrics.jsonl")) for path in grpo]
    ends = [fmean(reward for _, reward in curve[-5:]) for curve in curves]
    small = [
        held_out(
            read_metrics(trained(runs / f"grpo-16-{seed}", seed=seed, **SMALL, **GROUPS) / "metrics.jsonl"),
            per_iteration=16,
        )
        for seed in range(seeds)
    ]
    for seed in range(seeds):
        by_all = {"": grpo[seed] / "model"}
        of_64 = student_run(runs / f"student-{seed}", by_all, seed=seed, **LARGE)
        of_16 = student_run(runs / f"student-16-{seed}", by_all, seed=seed, **SMALL, **SINGLE)
        both = (held_out(of_64), small[seed], held_out(of_16, per_iteration=16))
        tell(str(seed), ends[seed], (curves[seed], *both), (of_64, of_16))
    by_source = {"even": grpo[0] / "model", "odd": grpo[1] / "model"}
    more = {"seed": 0, "agent": "benchmarks.teacher:SourcesAgent"}
    of_64 = student_run(runs / "student-sources", by_source, **LARGE, **more)
    of_16 = student_run(runs / "student-16-sources", by_source, **SMALL, **SINGLE, **more)
    both = (held_out(of_64), small[0], held_out(of_16, per_iteration=16))
    tell("0, 1", fmean(ends[:2]), (curves[0], *both), (of_64, of_16))
    console.print(table)
    console.print(f"{time.monotonic() - began:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Does a student learn from its teacher alone?")
    parser.add_argument("--runs", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--smollm2", action="store_true", help="SmolLM2-135M in place of the tiny policy")
    options = parser.parse_args()
    (smollm2 if options.smollm2 else tiny_policy)(options.runs, options.seeds)


if __name__ == "__main__":
    main()
