"""``agl-slime onset``: when behaviours began in a run, and their effect on the reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from agl_slime.cli.export import kept_rollouts
from agl_slime.errors import ConfigError
from agl_slime.report.onset import LEAST_AFTER, LEAST_BEFORE, LEAST_RISE, find_onsets
from agl_slime.report.traits import see


@dataclass(frozen=True, kw_only=True)
class OnsetConfig:
    """Name behaviours that began during a run: phrases, tool calls, the answer's shape and length, refusals, echoes of
    the prompt, rewards without a tool; each with its iteration, first rollouts and effect on the reward. Reads kept
    rollouts (train with --keep-rollouts all); needs no model and no network."""

    run_dir: tyro.conf.Positional[Path]
    """The directory of a run."""
    least_rise: float = LEAST_RISE
    """Least rise of the share of rollouts that show a behaviour."""
    most: int = 10
    """Behaviours that are shown."""


def main(arguments: Sequence[str]) -> None:
    config = tyro.cli(OnsetConfig, prog="agl-slime onset", args=list(arguments))
    if not 0 < config.least_rise < 1:
        raise ConfigError(f"--least-rise {config.least_rise}: must be between 0 and 1")
    seen = [one for line in kept_rollouts(config.run_dir) if (one := see(line)) is not None]
    iterations = len({one.iteration for one in seen})
    if iterations < LEAST_BEFORE + LEAST_AFTER:
        least = f"an onset needs {LEAST_BEFORE + LEAST_AFTER}"
        raise ConfigError(f"{config.run_dir}: kept rollouts with answers are of {iterations} iterations; {least}")
    onsets = find_onsets(seen, least_rise=config.least_rise)
    print(f"Behaviours that began: {len(onsets)}, in {len(seen)} kept rollouts of {iterations} iterations.")
    for onset in onsets[: config.most]:
        print(f"\n{onset.sentence}\n  first rollouts: {', '.join(onset.first)}")
        if onset.also:
            print(f"  in nearly the same rollouts: {'; '.join(map(str, onset.also[:3]))}")
