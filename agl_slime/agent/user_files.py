"""``import_file(path)``: Python files as importable modules.

Each file is a submodule of this one whose name encodes the path, so a worker or a Ray actor that unpickles one of its
classes imports the same file. Only files that a user named are imported.
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

__path__: list[str] = []  # a package without a directory: _Finder locates its modules


def import_file(path: str | Path, *, reload: bool = False) -> ModuleType:
    """The file as a module, executed at its first import, and again with ``reload``. It can import modules beside it,
    after installed ones of the same name. Raises ``ConfigError`` for a missing file, and any error of the file."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ConfigError(f"there is no file {path}")
    stem = re.sub(r"\W", "_", file.stem)
    name = f"{__name__}.{stem}_{str(file).encode().hex()}"
    if reload:
        sys.modules.pop(name, None)
    return importlib.import_module(name)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        parent, _, name = fullname.rpartition(".")
        if parent != __name__:
            return None
        try:
            file = Path(bytes.fromhex(name.rpartition("_")[2]).decode())
        except ValueError:  # such as a relative import in the file
            return None
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        return spec_from_file_location(fullname, file)


sys.meta_path.append(_Finder())
