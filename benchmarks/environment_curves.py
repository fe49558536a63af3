"""Does training on environments of verifiers learn? A tiny policy, warmed up on answers that are right and wrong, on
three datasets of reasoning-gym, a game of several turns against a fixed opponent, and one of self-play.

    AGL_ENV_PYTHON=DIR/bin/python python -m benchmarks.environment_curves OUT [--cases gcd kuhn] [--seeds 3]

Each run is `train.py`, then `agl-slime eval RUN --with-start` on tasks that it held out (the taskset's own split for
evaluation, which the warm-up does not see either), with 95 % intervals; self-play is evaluated against the fixed
opponent as well. A row is written to OUT/rows.jsonl when its run ends; a run that is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agl_slime.cli.demo.formats import UNSURE, Demonstration, Quality
from agl_slime.report import read_metrics
from agl_slime.tools.demo_policy.warmup import PolicySettings, make_policy

REPO = Path(__file__).resolve().parent.parent
K = 4
COLUMNS = "environment, seed, first reward, last, held out before, after, sampled, trained, log-prob diff, s, load"


@dataclass(frozen=True, kw_only=True)
class Case:
    """``taskset``: the taskset's settings; ``others``: further settings; ``measured``: settings of a second
    evaluation."""

    env: str
    taskset: Mapping[str, Any]
    others: tuple[str, ...] = ()
    measured: tuple[str, ...] | None = None
    warmup: Mapping[str, Any] = field(default_factory=dict)
    iterations: int = 20
    tasks: int = 50
    model: str | None = None
    flags: tuple[str, ...] = ("--rollout-batch-size", "8", "--n-samples-per-prompt", "8", "--max-new-tokens", "16")

    def arguments(self, others: tuple[str, ...]) -> list[str]:
        words = []
        for name, value in self.taskset.items():
            words += [f"--env.taskset.{name}", value if isinstance(value, str) else json.dumps(value)]
        return [*words, *others]


def dataset(name: str, options: Mapping[str, Any], **how: Any) -> Case:
    taskset = {"instructions": "direct", "size": 300, "eval_share": 0.25, "options": {name: options}}
    return Case(env=f"reasoning-gym:{name}", taskset=taskset, **how)


_SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
_KUHN: dict[str, Any] = {
    "env": "textarena:KuhnPoker-v0",
    "taskset": {"size": 300},
    "warmup": {"target": 0.4, "batch_size": 8},
    "iterations": 15,
    "flags": ("--rollout-batch-size", "4", "--n-samples-per-prompt", "8", "--max-new-tokens", "16"),
}
CASES = {
    "gcd": dataset("gcd", {"min_value": 2, "max_value": 20}, warmup={"target": 0.6}),
    "chain_sum": dataset("chain_sum", _SUMS, warmup={"target": 0.5}),
    "needle_haystack": dataset(
        "needle_haystack", {"min_num_statements": 3, "max_num_statements": 3}, warmup={"target": 0.5}
    ),
    "kuhn": Case(**_KUHN),
    "kuhn, self-play": Case(**_KUHN, others=("--env.play", "self"), measured=("--env.play", "fixed")),
}


@dataclass
class Shown:
    """Conversations of the environment; ``blurred`` of the answers of imperfect ones are none."""

    conversations: list[Demonstration]
    blurred: float = 0.6

    def demonstrations(self, rng: random.Random, n: int, *, quality: Quality) -> list[Demonstration]:
        return [self._one(rng, rng.choice(self.conversations), quality) for _ in range(n)]

    def _one(self, rng: random.Random, whole: Demonstration, quality: Quality) -> Demonstration:
        made: Demonstration = []
        for message in whole:
            made.append(message)
            if message["role"] == "assistant" and quality == "imperfect" and rng.random() < self.blurred:
                return [*made[:-1], {**message, "content": UNSURE}]
        return made


def policy_of(case: Case, directory: Path) -> Path:
    """One for all seeds of an environment."""
    if not directory.exists():
        request = json.dumps({"env": case.env, "taskset": dict(case.taskset)})
        command = [os.environ["AGL_ENV_PYTHON"], "-m", "benchmarks.environment_demonstrations", request]
        env = {**os.environ, "PYTHONPATH": str(REPO)}
        shown = subprocess.run(command, cwd=REPO, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
        make_policy(directory, demonstrations=Shown(json.loads(shown)), settings=PolicySettings(**case.warmup))
    return directory


def command(*words: str | Path, log: Path) -> None:
    with log.open("a") as out:
        done = subprocess.run([sys.executable, *map(str, words)], cwd=REPO, stdout=out, stderr=out, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}: {done.returncode}; see {log}")


def evaluated(case: Case, out: Path, words: list[str | Path]) -> list[dict[str, Any]]:
    """The two models of an evaluation on the same tasks."""
    how = ("--k", str(K), "--n-tasks", str(case.tasks), "--output-dir", out)
    command("-m", "agl_slime", "eval", *words, *how, log=out.with_suffix(".log"))
    found = json.loads((out / "eval.json").read_text())
    return [{"model": one["model"], **one["reward"], "failed": one.get("failed")} for one in found["models"]]


def run(name: str, case: Case, seed: int, out: Path) -> dict[str, Any]:
    began, load = time.monotonic(), os.getloadavg()[0]
    policy = policy_of(case, out / "policies" / case.env.partition(":")[2])
    directory = out / f"{name.replace(', ', '-')}-{seed}"
    training = time.monotonic()
    flags = ["--model", policy, "--num-iterations", str(case.iterations), "--eval-interval", "1000"]
    flags += ["--eval-rollouts", "1", "--save-interval", "1000", "--seed", str(seed), "--view", "lines", "--overwrite"]
    env = ["--env", case.env, *case.arguments(case.others)]
    command("train.py", *env, *case.flags, *flags, "--output-dir", directory, log=out / f"{directory.name}.log")
    rows = read_metrics(directory / "metrics.jsonl")
    trained = time.monotonic() - training
    before, after = evaluated(case, out / f"{directory.name}-eval", [directory, "--with-start"])
    row = {
        "environment": name,
        "seed": seed,
        "first": rows[0]["rollout/reward_mean"],
        "last": sum(one["rollout/reward_mean"] for one in rows[-3:]) / 3,
        "before": before,
        "after": after,
        "sampled": sum(one["rollout/tokens_sampled"] for one in rows),
        "trained": sum(one["train/tokens_trained"] for one in rows),
        "failed": sum(one["rollout/failed"] for one in rows),
        "retokenized": sum(one["trace/retokenized"] for one in rows),
        "logprob_diff": max(one["train/logprob_diff_max"] for one in rows),
        "training_s": trained,
        "load": [load, os.getloadavg()[0]],
    }
    if case.measured is not None:
        words = [policy, directory / "model", "--env", case.env, *case.arguments(case.measured)]
        words += ["--max-new-tokens", "16"]
        row["measured"] = evaluated(case, out / f"{directory.name}-eval-fixed", words)
    row["seconds"] = time.monotonic() - began
    return row


def shown(row: Mapping[str, Any]) -> str:
    def spell(one: Mapping[str, Any]) -> str:
        return f"{one['mean']:.2f} [{one['low']:.2f}, {one['high']:.2f}]"

    lines = [(row["environment"], row["before"], row["after"])]
    if "measured" in row:
        lines.append((f"{row['environment']}, against the fixed opponent", *row["measured"]))
    told = []
    for number, (name, before, after) in enumerate(lines):
        cells = [name, row["seed"], f"{row['first']:.2f}", f"{row['last']:.2f}", spell(before), spell(after)]
        cells += [row["sampled"], row["trained"], f"{row['logprob_diff']:.1e}", f"{row['training_s']:.0f}"]
        cells += [f"{max(row['load']):.0f}"]
        blank = [*cells[:2], "", "", *cells[4:6], "", "", "", "", ""]
        told.append("| " + " | ".join(map(str, blank if number else cells)) + " |")
    return "\n".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / "rows.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    print("| " + " | ".join(COLUMNS.split(", ")) + " |\n" + "|---" * len(COLUMNS.split(", ")) + "|")
    for name in args.cases:
        for seed in range(args.seeds):
            row = next((one for one in rows if (one["environment"], one["seed"]) == (name, seed)), None)
            if row is None:
                row = run(name, CASES[name], seed, args.out)
                with kept.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print(shown(row), flush=True)


if __name__ == "__main__":
    main()
