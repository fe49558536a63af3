"""Tasksets for verifiers by short names: ``env_block`` makes ``reasoning-gym:chain_sum`` an ``env`` block of verifiers.

verifiers' evaluation with these tasksets:
``python -m agl_slime.environments.tasksets agl_reasoning_gym --env.taskset.datasets '{"chain_sum": 1}'``.
"""

from __future__ import annotations

from typing import Any

from agl_slime.environments.plugins import add_to_path

FIELDS = {"reasoning-gym": "datasets", "textarena": "game", "bfcl": "category"}


def env_block(name: str) -> dict[str, Any] | None:
    """The raw ``env`` block for a name of this package (``reasoning-gym:chain_sum=2,leg_counting``, where numbers are
    weights, ``textarena:TicTacToe-v0``, ``bfcl:multi_turn_base``); ``None`` for other tasksets."""
    kind, _, rest = name.partition(":")
    if kind not in FIELDS:
        return None
    if not rest:
        raise ValueError(f"--env {name}: give the {FIELDS[kind]} after a colon, as {kind}:NAME")
    add_to_path()
    taskset: dict[str, Any] = {"id": f"agl_{kind.replace('-', '_')}"}
    if kind != "reasoning-gym":
        return {"taskset": {**taskset, FIELDS[kind]: rest}}
    weights = {}
    for part in rest.split(","):
        dataset, _, weight = part.partition("=")
        try:
            weights[dataset.strip()] = float(weight or 1)
        except ValueError:
            raise ValueError(f"--env {name}: the weight of {dataset} must be a number, got {weight!r}") from None
    return {"taskset": {**taskset, "datasets": weights}}
