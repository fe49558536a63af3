"""Finding generators: files named ``*_generator.py`` in a directory that a person named, each with ``TASK_TYPE`` and
``run_rollout``."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from agl_slime.buffer.pipeline import STAGE_NAMES

logger = logging.getLogger(__name__)

SHIPPED_GENERATORS = Path(__file__).parent / "generators"


@dataclass(frozen=True, slots=True)
class Generator:
    """A usable generator file and the stages that it brings."""

    task_type: str
    path: Path
    stages: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Discovery:
    """What a directory holds: generators by task type, and by file name what is wrong with the others."""

    generators: dict[str, Generator] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def discover_generators(directory: Path) -> Discovery:
    """Load every ``*_generator.py`` of the directory. Broken files and second files for a task type are reported and
    left out."""
    found = Discovery()
    for path in sorted(directory.glob("*_generator.py")):
        try:
            generator = _generator_of(load_generator(path), path)
        except (Exception, SystemExit) as error:  # a file of somebody else's may do anything while it is loaded
            problem = f"cannot be used: {type(error).__name__}: {error}"
        else:
            first = found.generators.setdefault(generator.task_type, generator)
            if first is generator:
                continue
            problem = f"has the task type {generator.task_type!r} of {first.path.name} and is left out"
        found.problems[path.name] = problem
        logger.warning("The generator %s %s", path, problem)
    return found


def load_generator(path: Path) -> ModuleType:
    """Import a file under a name of its own. Its directory is searched for imports after everything else."""
    directory = str(path.parent)
    if directory not in sys.path:
        sys.path.append(directory)
    name = f"agl_slime_generator_{path.stem}_{hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _generator_of(module: ModuleType, path: Path) -> Generator:
    task_type = getattr(module, "TASK_TYPE", None)
    if not isinstance(task_type, str) or not task_type:
        raise TypeError(f"TASK_TYPE is {task_type!r}; expected a name")
    if not callable(getattr(module, "run_rollout", None)):
        raise TypeError("run_rollout(data) is missing")
    stages = {name: function for name in STAGE_NAMES if callable(function := getattr(module, name, None))}
    return Generator(task_type, path, stages)
