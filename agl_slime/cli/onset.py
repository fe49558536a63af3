"""``agl-slime onset``: when behaviours began in a run, and their effect on the reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tyro

from agl_slime.cli.export import kept_rollouts
from agl_slime.errors import ConfigError
from agl_slime.report.onset import LEAST_AFTER, LEAST_BEFORE, LEAST_RISE, find_onsets
from agl_slime.report.traits import see


def main(arguments: Sequence[str]) -> None:
    tyro.cli(onset, prog="agl-slime onset", args=list(arguments))


def onset(run_dir: tyro.conf.Positional[Path], least_rise: float = LEAST_RISE, most: int = 10) -> None:
    """Name behaviours that began during a run: phrases, tool calls, the answer's shape and length, refusals, echoes of
    the prompt, rewards without a tool; each with its iteration, first rollouts and effect on the reward. Reads kept
    rollouts (train with --keep-rollouts all); needs no model and no network.

    Args:
        run_dir: The directory of a run.
        least_rise: Least rise of the share of rollouts that show a behaviour.
        most: Behaviours that are shown.
    """
    if not 0 < least_rise < 1:
        raise ConfigError(f"--least-rise {least_rise}: must be between 0 and 1")
    seen = [one for line in kept_rollouts(run_dir) if (one := see(line)) is not None]
    iterations = len({one.iteration for one in seen})
    if iterations < LEAST_BEFORE + LEAST_AFTER:
        least = f"an onset needs {LEAST_BEFORE + LEAST_AFTER}"
        raise ConfigError(f"{run_dir}: kept rollouts with answers are of {iterations} iterations; {least}")
    onsets = find_onsets(seen, least_rise=least_rise)
    print(f"Behaviours that began: {len(onsets)}, in {len(seen)} kept rollouts of {iterations} iterations.")
    for begun in onsets[:most]:
        print(f"\n{begun.sentence}\n  first rollouts: {', '.join(begun.first)}")
        if begun.also:
            print(f"  in nearly the same rollouts: {'; '.join(map(str, begun.also[:3]))}")
