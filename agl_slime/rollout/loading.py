"""Loading what a person named on the command line."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from agl_slime.errors import ConfigError, spell_exception
from agl_slime.rollout.by_file import import_file

logger = logging.getLogger(__name__)

DEFAULT_AGENT = "agl_slime.demo.agent:LookupAgent"
# Where the first command's agent was while ``agents`` was a package of ours; it is OpenAI's Agents SDK now.
_OLD_DEFAULT_AGENT = "agents.lookup:LookupAgent"


def split_agent(path: str) -> tuple[str, str]:
    """Module or file, and class, of ``module:Class`` or ``path/to/file.py:Class``. Raises ``ConfigError``."""
    source, _, name = path.rpartition(":")
    is_module = all(part.isidentifier() for part in source.split("."))
    if not name.isidentifier() or not (is_module or source.endswith(".py")):
        raise ConfigError(
            f"--agent {path}: expected module:Class or path/to/file.py:Class, for example {DEFAULT_AGENT}"
        )
    return source, name


def load_agent(path: str) -> Any:
    """An instance of the agent class named ``module:Class`` or ``path/to/file.py:Class``; modules are looked for in the
    working directory too, as with ``python -m``.

    Raises ``ConfigError`` with one sentence, whatever the person's module or class does.
    """
    source, class_name = split_agent(path)
    if path == _OLD_DEFAULT_AGENT:
        logger.warning("--agent %s is now %s.", path, DEFAULT_AGENT)
        source, class_name = split_agent(DEFAULT_AGENT)
    try:
        return _made(_imported(source), source, class_name)
    except _UnusableError as error:
        raise ConfigError(f"--agent {path}: {error}") from error.__cause__


class _UnusableError(Exception):
    """Why the agent cannot be used."""


def _made(module: ModuleType, source: str, name: str) -> Any:
    from agl_slime.support.agl import LitAgent

    agent_class = getattr(module, name, None)
    if agent_class is None:
        own = [value for value in vars(module).values() if isinstance(value, type)]
        classes = sorted(value.__name__ for value in own if value.__module__ == module.__name__)
        raise _UnusableError(f"{source} has no class {name!r}; it has {', '.join(classes) or 'none'}")
    if not (isinstance(agent_class, type) and issubclass(agent_class, LitAgent)):
        raise _UnusableError(f"{name} is not an Agent Lightning LitAgent; derive it from agl_slime.SGLangLitAgent")
    try:
        inspect.signature(agent_class).bind()
    except TypeError as error:
        why = f"{name}() cannot be made without arguments ({error}); give its parameters defaults"
        raise _UnusableError(why) from error
    try:
        return agent_class()
    except Exception as error:
        raise _UnusableError(f"{name}() failed with {spell_exception(error)}") from error


def _imported(source: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if source.endswith(".py") and not Path(source).expanduser().is_file():
        raise _UnusableError(f"there is no file {source}")
    try:
        return import_file(source) if source.endswith(".py") else importlib.import_module(source)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{source}.".startswith(f"{missing}."):
            why = f"there is no module {missing!r} here; run from the directory that holds it, or give its file"
        elif missing.partition(".")[0] == source.partition(".")[0]:
            why = f"{source} imports {missing!r}, which is not there"
        else:
            why = f"{source} needs the module {missing!r}, which is not installed"
        raise _UnusableError(why) from error
    except ConfigError:
        raise
    except Exception as error:
        raise _UnusableError(f"importing {source} failed with {spell_exception(error)}") from error
