"""``agl-slime new``: an agent to start from."""

from __future__ import annotations

import shutil
from pathlib import Path

import tyro

from agl_slime.errors import ConfigError
from agl_slime.support.terminal import print_line


def new(directory: tyro.conf.Positional[Path]) -> None:
    """Write an agent to start from: two tools, a reward of two parts, a test, and a README with the next commands.

    Args:
        directory: A new directory.
    """
    if directory.exists():
        raise ConfigError(f"{directory} exists: name a new directory")
    shutil.copytree(Path(__file__).parent / "template", directory, ignore=shutil.ignore_patterns("__pycache__"))
    print_line(f"{directory}: agent.py, test_agent.py and README.md, which has the next commands")
