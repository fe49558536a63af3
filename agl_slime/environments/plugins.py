"""Plug-ins of this package, entered where verifiers finds them: by the name of a top-level module."""

from __future__ import annotations

import importlib
import sys


def register(room: str, kind: str) -> str:
    """The id of ``agl_slime.environments.ROOM.KIND`` for verifiers from now on, as ``agl_reasoning_gym``."""
    module = kind.replace("-", "_")
    sys.modules.setdefault(f"agl_{module}", importlib.import_module(f"agl_slime.environments.{room}.{module}"))
    return f"agl_{module}"
