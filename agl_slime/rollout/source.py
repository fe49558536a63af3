"""A digest of an agent's source, that tells whether rollouts of before are still those of this agent."""

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
    """Of the files of ``modules``, of the modules of the agent's classes and of all that these have imported and keep a
    name of, but for installed packages. What is imported within a function, and data, is not seen."""
    digest = hashlib.blake2b(digest_size=16)
    found = {file: name for name, file in _files(agent, modules)}
    for file in sorted(found, key=lambda file: (found[file], file)):
        digest.update(hashlib.blake2b(Path(file).read_bytes()).digest())
    return digest.hexdigest()


def _files(agent: Any, modules: Sequence[ModuleType]) -> Iterator[tuple[str, str]]:
    """Name and file of each module."""
    classes = (sys.modules.get(one.__module__) for one in type(agent).__mro__)
    left = [*modules, *(module for module in classes if module is not None and not _is_installed(module))]
    seen = set[int]()
    while left:
        module = left.pop()
        file = getattr(module, "__file__", None)
        if id(module) in seen or not isinstance(file, str):
            continue
        seen.add(id(module))
        if Path(file).is_file():
            yield module.__name__.rpartition(".")[2], file
        for value in list(vars(module).values()):
            name = getattr(value, "__module__", None)
            of = value if isinstance(value, ModuleType) else sys.modules.get(name) if isinstance(name, str) else None
            if of is not None and not _is_installed(of):
                left.append(of)


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    ours = module.__name__.partition(".")[0] == __name__.partition(".")[0] and ".by_file." not in module.__name__
    return ours or not isinstance(file, str) or file.startswith(_INSTALLED)
