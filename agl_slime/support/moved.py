"""Names of 0.1's first layout that a user may have written: they go on working in this version, with a warning that
names the new place.

An old module that is gone is imported as one that looks each name up in the rooms where its contents went. Where a room
has taken an old module's name (``agl_slime.loop``), the room's ``__init__`` does the same by ``names_from``.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_OLD_MODULES: dict[str, tuple[str, ...]] = {}
"""Old module: where its names are looked for, in this order."""


def names_from(module: str, *homes: str) -> Callable[[str], Any]:
    """A module's ``__getattr__`` that finds old names in ``homes``. Raises ``AttributeError`` where none has it."""

    def get(name: str) -> Any:
        if not name.startswith("__"):
            for home in homes:
                found = getattr(import_module(home), name, None)
                if found is not None:
                    text = f"{module}.{name} is now {home}.{name}; the old name goes with the next version"
                    warnings.warn(text, FutureWarning, stacklevel=2)
                    return found
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get


class _MovedModules(MetaPathFinder, Loader):
    """Asked last, so only for what is nowhere else."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in _OLD_MODULES else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = names_from(module.__name__, *_OLD_MODULES[module.__name__])  # type: ignore[method-assign]


def install() -> None:
    """Called once, by ``agl_slime/__init__``."""
    sys.meta_path.append(_MovedModules())


__all__ = ["install", "names_from"]
