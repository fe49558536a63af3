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
    module = _import(source, path)
    try:
        agent_class = getattr(module, class_name)
    except AttributeError as error:
        classes = sorted(
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        )
        raise ConfigError(
            f"--agent {path}: {source} has no class {class_name!r}; it has {', '.join(classes) or 'none'}"
        ) from error
    from agl_slime.support.agl import LitAgent

    if not (isinstance(agent_class, type) and issubclass(agent_class, LitAgent)):
        raise ConfigError(
            f"--agent {path}: {class_name} is not an Agent Lightning LitAgent; derive it from agl_slime.SGLangLitAgent"
        )
    try:
        inspect.signature(agent_class).bind()
    except TypeError as error:
        raise ConfigError(
            f"--agent {path}: {class_name}() cannot be made without arguments ({error}); give its parameters defaults"
        ) from error
    try:
        return agent_class()
    except Exception as error:
        raise ConfigError(f"--agent {path}: {class_name}() failed with {spell_exception(error)}") from error


def _import(source: str, path: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_file(source) if source.endswith(".py") else importlib.import_module(source)
    except FileNotFoundError as error:
        if error.filename is None:
            raise ConfigError(f"--agent {path}: {error}") from error
        raise ConfigError(f"--agent {path}: importing {source} failed with {spell_exception(error)}") from error
    except ModuleNotFoundError as error:
        if error.name and f"{source}.".startswith(f"{error.name}."):
            fix = "run from the directory that holds it, or give path/to/file.py:Class"
            raise ConfigError(f"--agent {path}: there is no module {error.name!r} here; {fix}") from error
        if error.name and error.name.partition(".")[0] == source.partition(".")[0]:
            raise ConfigError(f"--agent {path}: {source} imports {error.name!r}, which is not there") from error
        raise ConfigError(
            f"--agent {path}: {source} needs the module {error.name!r}, which is not installed"
        ) from error
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"--agent {path}: importing {source} failed with {spell_exception(error)}") from error
