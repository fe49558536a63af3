"""Modules that are named by their file: ``import_file(path)``.

Each is a submodule of this one whose name spells the path, so that another process (a worker, a Ray actor) which
unpickles one of its classes imports the same file. Only what somebody has named is imported.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from agl_slime.errors import ConfigError

__path__: list[str] = []  # a package without a directory: its modules are found below


def import_file(path: str | Path, *, again: bool = False) -> ModuleType:
    """The module in the file, run when it is imported first, or ``again``. What stands beside the file can be imported
    by it, unless something of that name is installed. Raises what the file raises, and ``ConfigError``."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"there is no file {path}")
    stem = re.sub(r"\W", "_", file.stem)
    name = f"{__name__}.{stem}_{str(file).encode().hex()}"
    if again:
        sys.modules.pop(name, None)
    return importlib.import_module(name)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        parent, _, name = fullname.rpartition(".")
        if parent != __name__:
            return None
        try:
            file = Path(bytes.fromhex(name.rpartition("_")[2]).decode())
        except ValueError:  # a relative import of the file's, say
            return None
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        return spec_from_file_location(fullname, file)


sys.meta_path.append(_Finder())
