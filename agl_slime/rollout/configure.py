"""Multi-turn settings from the command line: plug-in files, a scheduler by name, a limit of turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from agl_slime.errors import ConfigError, spell_exception
from agl_slime.rollout.agent import SGLangLitAgent
from agl_slime.rollout.by_file import import_file
from agl_slime.rollout.scheduler import make_scheduler, scheduler_names


def load_plugins(paths: Sequence[str | Path]) -> list[ModuleType]:
    """Run the named files, once each; what they register (schedulers, tool parsers, loss masks) is known afterwards.
    Raises ``ConfigError`` when one is not there or fails."""
    modules = []
    for path in paths:
        if Path(path).suffix != ".py" or not Path(path).expanduser().is_file():
            raise ConfigError(f"--external-plugins {path}: there is no such Python file")
        try:
            modules.append(import_file(path))
        except Exception as error:  # anything may go wrong in a file of somebody else's
            raise ConfigError(f"--external-plugins {path} failed with {spell_exception(error)}") from error
    return modules


def configure_agent(
    agent: Any, *, scheduler: str | None = None, max_turns: int | None = None, plugins: Sequence[str | Path] = ()
) -> None:
    """Load ``plugins``, then give ``agent`` the scheduler of that name and the limit. Raises ``ConfigError`` with one
    sentence when that cannot be."""
    load_plugins(plugins)
    if max_turns is not None and max_turns < 1:
        raise ConfigError(f"--max-turns must be at least 1, got {max_turns}")
    if scheduler is None and max_turns is None:
        return
    name = type(agent).__name__
    if not isinstance(agent, SGLangLitAgent):
        raise ConfigError(f"--multi-turn-scheduler and --max-turns need an SGLangLitAgent, not a {name}")
    if scheduler is not None:
        if type(agent).run is not SGLangLitAgent.run:
            raise ConfigError(f"--multi-turn-scheduler {scheduler}: {name} has a run of its own, without a scheduler")
        if scheduler not in scheduler_names():
            known = ", ".join(scheduler_names()) or "none"
            raise ConfigError(f"--multi-turn-scheduler {scheduler}: there are {known}; name its --external-plugins")
        agent.scheduler = make_scheduler(scheduler, max_turns=max_turns)
    if max_turns is not None:
        agent.max_turns = max_turns
