"""Loading what a person named on the command line."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from agl_slime.errors import ConfigError, spell_exception
from agl_slime.loop.tasks import read_tasks
from agl_slime.run.settings import TrainConfig


def check_files(config: TrainConfig) -> None:
    """Raise ``ConfigError`` when a file that the settings name cannot be used: within milliseconds, before anything is
    loaded or started."""
    for flag, path in (("--tasks", config.tasks), ("--eval-tasks", config.eval_tasks)):
        if path is not None:
            read_tasks(path, flag=flag)
    if config.model_path is not None and not (config.model_path / "config.json").is_file():
        raise ConfigError(
            f"--model-path {config.model_path}: there is no Hugging Face checkpoint (no config.json); leave the flag out to make a tiny policy"
        )


def load_agent(path: str) -> Any:
    """An instance of the agent class named ``module:Class``; the working directory is searched too, as with ``python
    -m``.

    Raises ``ConfigError`` with one sentence, whatever the person's module or class does.
    """
    module_name, _, class_name = path.partition(":")
    if not class_name or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(
            f"--agent {path}: expected module:Class, with the module as in an import statement, for example agents.lookup:LookupAgent"
        )
    module = _import(module_name, path)
    try:
        agent_class = getattr(module, class_name)
    except AttributeError as error:
        classes = sorted(
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        )
        raise ConfigError(
            f"--agent {path}: {module_name} has no class {class_name!r}; it has {', '.join(classes) or 'none'}"
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


def _import(module_name: str, path: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"--agent {path}: there is no module {error.name!r} here; run from the directory that holds it"
            ) from error
        if error.name and error.name.partition(".")[0] == module_name.partition(".")[0]:
            raise ConfigError(f"--agent {path}: {module_name} imports {error.name!r}, which is not there") from error
        raise ConfigError(
            f"--agent {path}: {module_name} needs the module {error.name!r}, which is not installed"
        ) from error
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"--agent {path}: importing {module_name} failed with {spell_exception(error)}") from error
