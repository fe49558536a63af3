"""This package's plug-ins under verifiers' names: verifiers imports a plug-in by its id, as a top-level module."""

from __future__ import annotations

import sys
from pathlib import Path


def add_to_path() -> None:
    """Let verifiers find the modules ``agl_*`` of this directory."""
    directory = str(Path(__file__).parent)
    if directory not in sys.path:
        sys.path.append(directory)
