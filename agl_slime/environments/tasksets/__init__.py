"""Tasksets for verifiers, by a short name: ``reasoning-gym:chain_sum`` becomes the ``env`` block that verifiers takes.

Each is an ordinary plug-in. verifiers finds plug-ins by the name of a top-level module, which these are not;
``env_block`` enters them under such a name, and so does verifiers' own evaluation, started as
``python -m agl_slime.environments.tasksets agl_reasoning_gym --env.taskset.datasets '{"chain_sum": 1}'``.
"""

from __future__ import annotations

from typing import Any

from agl_slime.environments.plugins import register

FIELDS = {"reasoning-gym": "datasets", "textarena": "game", "bfcl": "category"}


def env_block(name: str) -> dict[str, Any] | None:
    """The raw ``env`` block for one of this package's names (``reasoning-gym:chain_sum=2,leg_counting``,
    ``textarena:TicTacToe-v0``, ``bfcl:multi_turn_base``); None where the name is another taskset's. ``KEY=VALUE`` after
    a dataset's name is its weight."""
    kind, _, rest = name.partition(":")
    if kind not in FIELDS:
        return None
    if not rest:
        raise ValueError(f"--env {name}: name what to play after a colon, as {kind}:NAME")
    taskset: dict[str, Any] = {"id": register("tasksets", kind)}
    if kind != "reasoning-gym":
        return {"taskset": {**taskset, FIELDS[kind]: rest}}
    weights = {}
    for part in rest.split(","):
        dataset, _, weight = part.partition("=")
        try:
            weights[dataset.strip()] = float(weight or 1)
        except ValueError:
            raise ValueError(f"--env {name}: the weight of {dataset} is a number, and not {weight!r}") from None
    return {"taskset": {**taskset, "datasets": weights}}
