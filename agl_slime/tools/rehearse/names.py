"""Names of code and of files where this module runs: why one does not resolve, and the nearest one that does. Uses the
standard library at its top, as a controller's Python runs it too:

    python names.py CODE        prints the reason and the nearest name as a JSON list, or null
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

_CUTOFF = 0.75  # of difflib's ratio: a letter or two of a short name


def unresolved(code: str) -> tuple[str, str] | None:
    """The reason why ``pkg.module.name``, ``pkg.module:name`` or ``file.py:name`` cannot be imported, and the nearest
    name that can, or ``""``; ``None`` if it can."""
    source, _, name = code.rpartition(":")
    try:
        _ = getattr(_file(source), name) if source.endswith(".py") else pkgutil.resolve_name(code)
    except (Exception, SystemExit) as error:  # a module may raise anything
        hint = _near_in_file(source, name) if source.endswith(".py") else _near_code(code)
        module = (source or code.rpartition(".")[0]).replace(":", ".")
        try:  # pkgutil takes a submodule whose own import fails for an attribute that is not there
            importlib.import_module(module if isinstance(error, AttributeError) else "sys")
        except (Exception, SystemExit) as cause:
            error = error if getattr(cause, "name", None) == module else cause
        return f"{type(error).__name__}: {error}", hint
    return None


def unresolved_elsewhere(code: str, python: str) -> tuple[str, str] | None:
    """``unresolved`` in another Python, from the current directory."""
    command = [python, __file__, code]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    try:
        answer = json.loads(finished.stdout.splitlines()[-1])
        return None if answer is None else (str(answer[0]), str(answer[1]))
    except (ValueError, LookupError, TypeError):  # it is no Python, or code of the module has ended it
        return (finished.stderr.strip().splitlines() or [f"{python} ended with code {finished.returncode}"])[-1], ""


def near_file(path: str | Path) -> str:
    """The nearest name in the directory of ``path``, with that directory, or ``""``."""
    file = Path(path)
    names = os.listdir(file.parent) if file.parent.is_dir() else []
    hint = nearest(file.name, names)
    return str(file.parent / hint) if hint else ""


def nearest(name: str, names: Iterable[str], *, cutoff: float = _CUTOFF) -> str:
    """The nearest of ``names`` by difflib's ratio, or ``""`` if none reaches ``cutoff``."""
    return (difflib.get_close_matches(name, [*names], n=1, cutoff=cutoff) or [""])[0]


def _file(path: str) -> ModuleType:
    from agl_slime.agent.user_files import import_file

    return import_file(path)


def _near_in_file(source: str, name: str) -> str:
    file = source if Path(source).is_file() else near_file(source)
    try:
        names = vars(_file(file)) if file.endswith(".py") else {}
    except (Exception, SystemExit):  # the file's own error is the reason already
        return ""
    hint = name if name in names else nearest(name, names)
    return f"{file}:{hint}" if hint else ""


def _near_code(code: str) -> str:
    """``code`` with each part that does not exist replaced by the nearest one beside it."""
    value: Any = None
    name = ""
    for part in re.split(r"(?=[.:])", code):
        outer, mark, attribute = value, part[: part[0] in ".:"], part.lstrip(".:")
        exists, value = _resolved(f"{name}{part}")
        if not exists:
            hint = nearest(attribute, _names(outer))
            exists, value = _resolved(f"{name}{mark}{hint}") if hint else (False, None)
            part = f"{mark}{hint}"
        if not exists:
            return ""
        name += part
    return name if name != code else ""


def _resolved(code: str) -> tuple[bool, Any]:
    try:
        return True, pkgutil.resolve_name(code)
    except (Exception, SystemExit):
        return False, None


def _names(container: Any) -> set[str]:
    """The attributes and submodules of an object, or all modules for ``None``."""
    if container is None:
        return {module.name for module in pkgutil.iter_modules()}
    return {*dir(container), *(module.name for module in pkgutil.iter_modules(getattr(container, "__path__", ())))}


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    print(json.dumps(unresolved(sys.argv[1])))
