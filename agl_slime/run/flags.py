"""The names of settings on a command line, and those of an environment among them."""

from __future__ import annotations

from collections.abc import Sequence


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def split_env_flags(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """A command line without the settings of an environment, and those: ``--env.KEY value``, ``--env.KEY=value``, and
    ``--env.KEY`` alone, which is a switch."""
    own, of_env, follows = [], [], False
    for one in arguments:
        if one.startswith("--env."):
            of_env.append(one)
            follows = "=" not in one
        elif follows and not one.startswith("--"):
            of_env.append(one)
            follows = False
        else:
            own.append(one)
            follows = False
    return own, tuple(of_env)
