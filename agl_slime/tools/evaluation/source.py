"""The digest of an agent's source, by which samples of another agent are never mixed into an evaluation."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def source_digest(agent: Any, modules: Sequence[ModuleType]) -> str:
    """The digest of the files of ``modules``, of the agent's classes and of all modules they import by name, without
    installed packages. Imports within functions, and data files, are not seen."""
    digest = hashlib.blake2b(digest_size=16)
    names = {file: name for name, file in _files(agent, modules)}
    for file in sorted(names, key=lambda file: (names[file], file)):
        digest.update(hashlib.blake2b(Path(file).read_bytes()).digest())
    return digest.hexdigest()


def _files(agent: Any, modules: Sequence[ModuleType]) -> Iterator[tuple[str, str]]:
    """Name and file of each module."""
    classes = (sys.modules.get(base.__module__) for base in type(agent).__mro__)
    pending = [*modules, *(module for module in classes if module is not None and not _is_installed(module))]
    visited = set[int]()
    while pending:
        module = pending.pop()
        file = getattr(module, "__file__", None)
        if id(module) in visited or not isinstance(file, str):
            continue
        visited.add(id(module))
        if Path(file).is_file():
            yield module.__name__.rpartition(".")[2], file
        for value in list(vars(module).values()):
            name = getattr(value, "__module__", None)
            origin = sys.modules.get(name) if isinstance(name, str) else None
            imported = value if isinstance(value, ModuleType) else origin
            if imported is not None and not _is_installed(imported):
                pending.append(imported)


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    ours = module.__name__.partition(".")[0] == __name__.partition(".")[0] and ".user_files." not in module.__name__
    return ours or not isinstance(file, str) or file.startswith(_INSTALLED)
