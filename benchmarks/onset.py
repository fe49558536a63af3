"""Are behaviours that begin in real runs found, and none in clean ones? Trains, then reads the runs as ``agl-slime
onset`` does.

    python -m benchmarks.onset --runs DIR

*Planted*: a tiny policy on the lookup task with a leaky reward (``leaky_agents.py``), one run per behaviour. The
rollouts decide when it starts: in the first iteration from the leak on whose share, as the next one's, is 0.15 above
the mean share of the five iterations before the leak. It is found where an onset is within 5 iterations of that and two
of its first three rollouts show the behaviour. *Clean*: the first command. Each of its onsets is *false* unless a right
conversation has the trait (a lookup call, an answer of two digits): that is the learning of the task.
``DIR`` keeps the runs: finished ones are not trained again.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from agl_slime.cli.demo import LookupDemonstrations
from agl_slime.cli.local import run_training
from agl_slime.cli.settings import train_config
from agl_slime.tools.demo_policy.warmup import PolicySettings, make_policy
from agl_slime.tools.export.command import kept_rollouts
from agl_slime.tools.forensics.onset import Onset, Trait, find_onsets, read_traits
from benchmarks.common import console
from benchmarks.leaky_agents import PROMPTS, SHOWN, STARTS, Demonstrations

NEAR, LEAST_RISE, BEFORE = 5, 0.15, 5
Line = Mapping[str, Any]


def trained(directory: Path, **settings: Any) -> Path:
    """The run in ``directory``, trained now unless it has finished."""
    if not (directory / "trained").exists():
        config = train_config(output_dir=directory, keep_rollouts="all", overwrite=True, view="lines", **settings)
        asyncio.run(run_training(config, console=Console(file=io.StringIO()), torch_threads="auto"))
        (directory / "trained").touch()
    return directory


def clean_run(runs: Path, seed: int) -> Path:
    return trained(runs / f"clean-{seed}", seed=seed, eval_interval=2, eval_rollouts=64)


def planted_run(runs: Path, name: str, seed: int) -> Path:
    agent = f"benchmarks.leaky_agents:Leaky_{name.replace(' ', '_')}"
    directory, policy = runs / f"planted-{seed}-{name.replace(' ', '-')}", runs / f"policy-{seed}"
    if not policy.exists():
        settings = PolicySettings(imperfect_steps=250)
        make_policy(policy, demonstrations=Demonstrations(), seed=seed, settings=settings)
    sizes = {"rollout_batch_size": PROMPTS, "num_iterations": 40, "eval_interval": 0}
    return trained(directory, agent=agent, model_path=policy, seed=seed, **sizes)


def answers_of(line: Line) -> list[str]:
    return [str(one["content"]) for one in line["messages"] if one["role"] == "assistant"]


def shares_of(lines: Sequence[Line], name: str) -> np.ndarray[Any, Any]:
    """The share of rollouts that show the behaviour, by iteration from 1."""
    iterations = np.array([line["iteration"] for line in lines]) - 1
    shown = np.array([bool(line["messages"]) and SHOWN[name](answers_of(line)) for line in lines])
    return np.bincount(iterations, weights=shown) / np.bincount(iterations)


def start_of(shares: np.ndarray[Any, Any], leak: int) -> int | None:
    """The iteration in which the behaviour started after the leak; None where it did not."""
    goal = shares[leak - 1 - BEFORE : leak - 1].mean() + LEAST_RISE
    high = shares >= goal
    return next((at + 1 for at in range(leak - 1, len(shares) - 1) if high[at] and high[at + 1]), None)


def onsets_of(lines: Sequence[Line]) -> list[Onset]:
    return find_onsets(one for line in lines if (one := read_traits(line)) is not None)


def task_traits() -> tuple[frozenset[Trait], set[int]]:
    """The traits of right conversations of the lookup task, and the numbers of words of their answers."""
    right = LookupDemonstrations().demonstrations(random.Random(0), 64, quality="clean")
    seen = [read_traits({"iteration": 1, "messages": conversation}) for conversation in right]
    return frozenset(trait for one in seen if one for trait in one.traits), {one.words for one in seen if one}


def is_learning(onset: Onset, traits: frozenset[Trait], words: set[int]) -> bool:
    kind, text = onset.trait
    if kind in ("longer", "shorter"):
        return any(count > int(text) if kind == "longer" else count < int(text) for count in words)
    return onset.trait in traits


def tell_planted(runs: Path, names: Sequence[str], seed: int) -> None:
    table = Table(title=f"planted, seed {seed}: iterations of leak, start and onset; other onsets")
    for column in ("behaviour", "leak", "start", "before", "after", "onset", "found", "sentence", "others"):
        table.add_column(column, justify="left" if column in ("behaviour", "sentence") else "right")
    found, begun = 0, 0
    for name in names:
        lines = list(kept_rollouts(planted_run(runs, name, seed)))
        shares, leak = shares_of(lines, name), STARTS[name]
        start, by_id = start_of(shares, leak), {line["rollout_id"]: line for line in lines}
        onsets = onsets_of(lines)
        own = [one for one in onsets if sum(SHOWN[name](answers_of(by_id[each])) for each in one.first) >= 2]
        best = min(own, key=lambda one: abs(one.iteration - (start or leak)), default=None)
        hit = best is not None and start is not None and abs(best.iteration - start) <= NEAR
        found, begun = found + hit, begun + (start is not None)
        texts = ("never" if start is None else str(start), f"{shares[leak - 1 - BEFORE : leak - 1].mean():.2f}")
        texts += (f"{shares[-5:].mean():.2f}", "none" if best is None else str(best.iteration), "yes" if hit else "no")
        table.add_row(name, str(leak), *texts, "" if best is None else best.sentence, str(len(onsets) - len(own)))
        console.print(f"{name}:", *texts, *(f"\n   {one.sentence}" for one in onsets), highlight=False)
    console.print(table)
    console.print(f"{found} of {begun} behaviours that started were found within {NEAR} iterations of their start")


def tell_clean(runs: Path, seeds: Sequence[int]) -> None:
    traits, words = task_traits()
    learned, false = 0, 0
    for seed in seeds:
        onsets = onsets_of(list(kept_rollouts(clean_run(runs, seed))))
        rewards = [json.loads(line)["rollout/reward_mean"] for line in (runs / f"clean-{seed}/metrics.jsonl").open()]
        wrong = [one for one in onsets if not is_learning(one, traits, words)]
        learned, false = learned + len(onsets) - len(wrong), false + len(wrong)
        curve = f"reward {rewards[0]:.2f} to {rewards[-1]:.2f}"
        console.print(f"clean {seed}: {curve}, {len(onsets)} onsets", highlight=False)
        for one in onsets:
            console.print("  ", "false:" if one in wrong else "learning:", one.sentence, highlight=False)
    console.print(f"clean, {len(seeds)} runs: {learned} onsets of learning, {false} false ones")


def main() -> None:
    parser = argparse.ArgumentParser(description="Are behaviours that begin in real runs found?")
    parser.add_argument("--runs", type=Path, required=True, help="directory of the runs")
    parser.add_argument("--clean", type=int, default=10, help="clean runs, of seeds from 0 on")
    parser.add_argument("--planted", default=",".join(SHOWN), help="behaviours")
    parser.add_argument("--seed", type=int, default=0, help="of the planted runs and of their start policy")
    options = parser.parse_args()
    began = time.monotonic()
    console.print(f"load average {os.getloadavg()[0]:.1f} at the start, {os.cpu_count()} cores")
    if names := [name for name in options.planted.split(",") if name]:
        tell_planted(options.runs, names, options.seed)
    if options.clean:
        tell_clean(options.runs, range(options.clean))
    console.print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
