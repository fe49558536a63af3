"""Names of settings on a command line, and the ``--env.KEY`` flags of an environment."""

from __future__ import annotations

from collections.abc import Sequence

_FILE = "--env.@"  # verifiers' programs read their settings from ``@ FILE.toml``


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def split_env_flags(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split a command line into our flags and the environment's: ``--env.KEY value``, ``--env.KEY=value``,
    ``--env.KEY`` alone, a switch, or ``--env.@ FILE.toml``."""
    ours, env_flags, value_expected = [], [], False
    for argument in arguments:
        is_env_flag = argument.startswith("--env.")
        is_env_value = value_expected and not argument.startswith("--")
        (env_flags if is_env_flag or is_env_value else ours).append("@" if argument == _FILE else argument)
        value_expected = is_env_flag and "=" not in argument
    return ours, tuple(env_flags)
