"""Load agents and plug-in files that are named on the command line."""

from __future__ import annotations

import copyreg
import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from agl_slime.agent.scheduler import schedulers
from agl_slime.agent.user_files import import_file
from agl_slime.errors import ConfigError, format_exception
from agl_slime.tokens.images import ImageSettings

logger = logging.getLogger(__name__)

DEFAULT_AGENT = "agl_slime.cli.demo.agent:LookupAgent"
_MODULE_ATTRIBUTES = ("make_task", "demonstrations")


def split_agent(path: str, *, flag: str = "--agent") -> tuple[str, str]:
    """Module or file, and name, of ``module:Name`` or ``path/to/file.py:Name``. Raises ``ConfigError``."""
    source, _, name = path.rpartition(":")
    is_module = all(part.isidentifier() for part in source.split("."))
    if not name.isidentifier() or not (is_module or source.endswith(".py")):
        raise ConfigError(f"{flag} {path}: expected module:Name or path/to/file.py:Name")
    return source, name


def only_agent(path: str) -> str:
    """``path``, or ``file.py:Name`` of the one agent of a file that is given without a name. Raises ``ConfigError``."""
    if ":" in path or not path.endswith(".py"):
        return path
    module = _imported_or_refused(path, path)
    from agl_slime.support.agl import LitAgent

    def is_agent(value: Any) -> bool:
        if isinstance(value, type):
            return issubclass(value, LitAgent) and value.__module__ == module.__name__
        local = callable(value) and getattr(value, "__module__", "") in (module.__name__, functools.__name__)
        return isinstance(value, LitAgent) or (local and [*inspect.signature(value).parameters][:2] == ["task", "llm"])

    names = sorted(name for name, value in vars(module).items() if is_agent(value))
    if len(names) != 1:
        raise ConfigError(f"{path} has {', '.join(names) or 'no agents'}: name one agent, as {path}:NAME")
    return f"{path}:{names[0]}"


def load_agent(path: str) -> Any:
    """The agent named ``module:Name`` or ``path/to/file.py:Name``, or the only one of ``path/to/file.py``: a new
    instance of that class, the agent object of that name (as ``@agl.rollout`` makes), or a function ``(task, llm)``,
    also a ``functools.partial`` or an object with ``__call__``, as such an object. Objects and functions take
    ``make_task`` and ``demonstrations`` from their module. Modules are searched in the working directory too, as with
    ``python -m``. Raises ``ConfigError`` with one sentence, whatever error the module or class raises."""
    source, name = split_agent(only_agent(path))

    def unusable(problem: str) -> ConfigError:
        return ConfigError(f"--agent {path}: {problem}")

    module = _imported_or_refused(source, f"--agent {path}")
    from agl_slime.support.agl import LitAgent

    agent_class = getattr(module, name, None)
    if agent_class is None:
        raise unusable(f"{source} has no class or agent {name!r}; it has {_agents_of(module, LitAgent) or 'none'}")
    if callable(agent_class) and not isinstance(agent_class, (type, LitAgent)) and not inspect.isbuiltin(agent_class):
        call = agent_class.__call__  # an object's method, which shows whether it is async
        function: Any = call if inspect.ismethod(call) else agent_class
        try:
            agent_class = _agent_of_function(function)
        except NotImplementedError as error:
            function = f"{name}{inspect.signature(function)}"
            problem = f"{function} is no agent; its parameters must be task and llm, perhaps rollout too"
            raise unusable(problem) from error
    if isinstance(agent_class, LitAgent):
        agent: Any = agent_class
        for attribute in _MODULE_ATTRIBUTES:
            if not hasattr(agent, attribute) and (value := getattr(module, attribute, None)) is not None:
                setattr(agent, attribute, value)
        _loaded[id(agent)] = agent, str(Path(source).resolve()) if source.endswith(".py") else source, name
        copyreg.pickle(type(agent), _reduce)
        return agent
    if not (isinstance(agent_class, type) and issubclass(agent_class, LitAgent)):
        fix = "derive a class from agl_slime.SGLangLitAgent, or write a function of (task, llm)"
        raise unusable(f"{name} is no agent: {fix}")
    try:
        inspect.signature(agent_class).bind()
    except TypeError as error:
        problem = f"{name}() cannot be made without arguments ({error}); give its parameters defaults"
        raise unusable(problem) from error
    try:
        return agent_class()
    except (Exception, SystemExit) as error:
        raise unusable(f"{name}() failed with {format_exception(error)}") from error


def _agents_of(module: ModuleType, base: type) -> str:
    """The names of a module's classes, agents and coroutine functions."""
    local = {key: value for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__}
    named = {key for key, value in local.items() if isinstance(value, type) or inspect.iscoroutinefunction(value)}
    return ", ".join(sorted(named | {key for key, value in vars(module).items() if isinstance(value, base)}))


@functools.cache
def _agent_of_function(function: Callable[..., Any]) -> Any:
    from agl_slime.support.agl import rollout

    return rollout(function)


# Agent objects by id, with source and name, by which they are pickled: an agent of @agl.rollout cannot be pickled
# itself, because its function's name refers to the agent.
_loaded: dict[int, tuple[Any, str, str]] = {}


def _reduce(agent: Any) -> Any:
    if id(agent) not in _loaded:
        return agent.__reduce_ex__(4)
    _, source, name = _loaded[id(agent)]
    return load_agent, (f"{source}:{name}",)


def _imported_or_refused(source: str, label: str) -> ModuleType:
    """``_imported``, whose every error is a ``ConfigError`` that begins with ``label``."""
    try:
        return _imported(source)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{label}: importing {source} failed with {format_exception(error)}") from error


def _imported(source: str) -> ModuleType:
    import agl_slime.support.agl  # noqa: F401  first, so that the module's own import of agentlightning needs no LiteLLM

    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return import_file(source) if source.endswith(".py") else importlib.import_module(source)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if f"{source}.".startswith(f"{missing}."):
            problem = f"there is no module {missing!r} here; run from the directory that contains it, or give its file"
        elif missing.partition(".")[0] == source.partition(".")[0]:
            problem = f"{source} imports {missing!r}, which does not exist"
        else:
            problem = f"{source} needs the module {missing!r}, which is not installed"
        raise ConfigError(problem) from error


def load_function(path: str, *, flag: str) -> Callable[..., Any]:
    """The function that a flag names, as ``load_agent`` finds agents. Raises ``ConfigError``."""
    source, name = split_agent(path, flag=flag)
    if not callable(function := getattr(_imported_or_refused(source, f"{flag} {path}"), name, None)):
        raise ConfigError(f"{flag} {path}: {source} has no function {name}")
    return function


def agent_module(path: str) -> ModuleType:
    """The module from which ``load_agent`` takes the agent."""
    return _imported(path if path.endswith(".py") else split_agent(path)[0])


def load_plugins(paths: Sequence[str | Path]) -> list[ModuleType]:
    """Execute these files, once each, to register plug-ins. Raises ``ConfigError`` when one is missing or fails."""
    modules = []
    for path in paths:
        if Path(path).suffix != ".py" or not Path(path).expanduser().is_file():
            raise ConfigError(f"--external-plugins {path}: there is no such Python file")
        try:
            modules.append(import_file(path))
        except (Exception, SystemExit) as error:  # user code may raise anything
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
    """Load ``plugins``, then set the named scheduler and the limits on ``agent``. Raises ``ConfigError`` for them, and
    for other attributes that no rollout could use."""
    load_plugins(plugins)
    from agl_slime.agent.agent import SGLangLitAgent  # imports Agent Lightning, which takes seconds

    name = type(agent).__name__
    if not isinstance(agent, SGLangLitAgent):
        if scheduler is not None:
            raise ConfigError(f"--multi-turn-scheduler needs an SGLangLitAgent, not a {name}")
        return  # the gateway limits its turns
    if scheduler is not None:
        if type(agent).run is not SGLangLitAgent.run:
            raise ConfigError(f"--multi-turn-scheduler {scheduler}: {name} overrides run, which calls the scheduler")
        if scheduler not in schedulers:
            names = ", ".join(sorted(schedulers)) or "none"
            raise ConfigError(f"--multi-turn-scheduler {scheduler}: there are {names}; name its --external-plugins")
        agent.scheduler = schedulers[scheduler](max_turns=max_turns)
    if max_turns is not None:
        agent.max_turns = max_turns
    if images is not None:
        agent.image_settings = images
    agent.check_settings()
