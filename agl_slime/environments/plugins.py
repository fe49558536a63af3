"""Registers this package's plug-ins for verifiers, which looks them up as top-level modules."""

from __future__ import annotations

import importlib
import sys


def register(room: str, kind: str) -> str:
    """Register ``agl_slime.environments.ROOM.KIND`` and return its id, such as ``agl_reasoning_gym``."""
    module = kind.replace("-", "_")
    sys.modules.setdefault(f"agl_{module}", importlib.import_module(f"agl_slime.environments.{room}.{module}"))
    return f"agl_{module}"
