"""Another Python on this machine, whose packages clash with this one's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from agl_slime.errors import ConfigError

_VERSION_TIMEOUT_S = 60


def without_pythonpath() -> dict[str, str]:
    """The environment without this process's PYTHONPATH."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def installed_version(
    python: str | Path, package: str, *, setting: str, fix: str, env: Mapping[str, str] | None = None
) -> str:
    """The version of ``package`` in ``python``, which ``setting`` named. Raises ``ConfigError``, with the ``fix``."""
    program = f"from importlib.metadata import version; print(version({package!r}))"
    command = [str(python), "-c", program]
    try:
        completed = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=True
        )
    except subprocess.CalledProcessError:
        raise ConfigError(f"{setting} {python}: this Python has no {package}; {fix}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{setting} {python}: it does not run as a Python ({error}); {fix}") from None
    return completed.stdout.strip()
