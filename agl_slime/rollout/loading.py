"""Loading what a person named on the command line."""

from __future__ import annotations

import copyreg
import importlib
import inspect
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from agl_slime.errors import ConfigError, format_exception
from agl_slime.rollout.by_file import import_file
from agl_slime.rollout.scheduler import schedulers
from agl_slime.tokens.images import ImageSettings

logger = logging.getLogger(__name__)

DEFAULT_AGENT = "agl_slime.demo.agent:LookupAgent"


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
    """The agent named ``module:Name`` or ``path/to/file.py:Name``: an instance of the class of that name, or what it
    names, an agent that was made there or by ``@agl.rollout``. Modules are looked for in the working directory too, as
    with ``python -m``.

    Raises ``ConfigError`` with one sentence, whatever the person's module or class does.
    """
    source, name = split_agent(path)

    def unusable(why: str) -> ConfigError:
        return ConfigError(f"--agent {path}: {why}")

    try:
        module = _imported(source)
    except ConfigError as error:
        raise unusable(str(error)) from error
    except (Exception, SystemExit) as error:
        raise unusable(f"importing {source} failed with {format_exception(error)}") from error
    from agl_slime.support.agl import LitAgent

    agent_class = getattr(module, name, None)
    if agent_class is None:
        own = [value for value in vars(module).values() if isinstance(value, type)]
        classes = {value.__name__ for value in own if value.__module__ == module.__name__}
        agents = {key for key, value in vars(module).items() if isinstance(value, LitAgent)}
        raise unusable(
            f"{source} has no class or agent {name!r}; it has {', '.join(sorted(classes | agents)) or 'none'}"
        )
    if isinstance(agent_class, LitAgent):
        found: Any = agent_class
        _known[id(found)] = found, str(Path(source).resolve()) if source.endswith(".py") else source, name
        copyreg.pickle(type(found), _reduced)
        return found
    if not (isinstance(agent_class, type) and issubclass(agent_class, LitAgent)):
        raise unusable(f"{name} is not an Agent Lightning LitAgent; derive it from agl_slime.SGLangLitAgent")
    try:
        inspect.signature(agent_class).bind()
    except TypeError as error:
        why = f"{name}() cannot be made without arguments ({error}); give its parameters defaults"
        raise unusable(why) from error
    try:
        return agent_class()
    except (Exception, SystemExit) as error:
        raise unusable(f"{name}() failed with {format_exception(error)}") from error


# Agents that modules hold: what @agl.rollout makes cannot be pickled, for its function is not found under its name.
_known: dict[int, tuple[Any, str, str]] = {}


def _reduced(agent: Any) -> Any:
    if id(agent) not in _known:
        return agent.__reduce_ex__(4)
    _, source, name = _known[id(agent)]
    return load_agent, (f"{source}:{name}",)


def _imported(source: str) -> ModuleType:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
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
        raise ConfigError(why) from error


def agent_module(path: str) -> ModuleType:
    """The module that ``load_agent`` finds the agent in."""
    return _imported(split_agent(path)[0])


def load_plugins(paths: Sequence[str | Path]) -> list[ModuleType]:
    """Run the named files, once each; what they register (schedulers, tool parsers, loss masks) is known afterwards.
    Raises ``ConfigError`` when one is not there or fails."""
    modules = []
    for path in paths:
        if Path(path).suffix != ".py" or not Path(path).expanduser().is_file():
            raise ConfigError(f"--external-plugins {path}: there is no such Python file")
        try:
            modules.append(import_file(path))
        except (Exception, SystemExit) as error:  # anything may go wrong in a file of somebody else's
            raise ConfigError(f"--external-plugins {path} failed with {format_exception(error)}") from error
    return modules


def configure_agent(
    agent: Any,
    *,
    scheduler: str | None = None,
    max_turns: int | None = None,
    images: ImageSettings | None = None,
    plugins: Sequence[str | Path] = (),
) -> None:
    """Load ``plugins``, then give ``agent`` the scheduler of that name and the limits."""
    load_plugins(plugins)
    if max_turns is not None and max_turns < 1:
        raise ConfigError(f"--max-turns must be at least 1, got {max_turns}")
    if scheduler is None and max_turns is None and images is None:
        return
    from agl_slime.rollout.agent import SGLangLitAgent  # imports Agent Lightning, which takes seconds

    name = type(agent).__name__
    if not isinstance(agent, SGLangLitAgent):
        if scheduler is not None:
            raise ConfigError(f"--multi-turn-scheduler needs an SGLangLitAgent, not a {name}")
        return  # the gateway counts its turns
    if scheduler is not None:
        if type(agent).run is not SGLangLitAgent.run:
            raise ConfigError(f"--multi-turn-scheduler {scheduler}: {name} has a run of its own, without a scheduler")
        if scheduler not in schedulers:
            known = ", ".join(sorted(schedulers)) or "none"
            raise ConfigError(f"--multi-turn-scheduler {scheduler}: there are {known}; name its --external-plugins")
        agent.scheduler = schedulers[scheduler](max_turns=max_turns)
    if max_turns is not None:
        agent.max_turns = max_turns
    if images is not None:
        agent.image_settings = images
