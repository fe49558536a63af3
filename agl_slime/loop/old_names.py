"""Arguments of ``OnlineRLLoop`` that ``observer`` and ``runners`` have replaced; they still work in this version."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agl_slime.report.events import Event, GroupsCollected, Observer, RunStarted
from agl_slime.runner.base import RunnerPlan

_OF_PLAN = {"runner_settings": "settings", "store_host": "store_host"}
_OF_RUN_STARTED = {"run_settings": "settings", "output_dir": "output_dir", "began": "at"}
_NEW = {
    "reporter": "observer",
    "on_groups": "observer, which is told GroupsCollected",
    **dict.fromkeys(_OF_RUN_STARTED, "observer"),
    **{old: f"runners=RunnerPlan({new}=...)" for old, new in _OF_PLAN.items()},
}


def observer_and_runners(
    observer: Observer | None, runners: RunnerPlan | str, given: Mapping[str, Any]
) -> tuple[Observer | None, RunnerPlan]:
    """The two arguments, with what was ``given`` under old names worked in. Raises ``TypeError`` on any other name."""
    for name in given:
        if name not in _NEW:
            raise TypeError(f"OnlineRLLoop() got an unexpected keyword argument {name!r}")
        warnings.warn(f"OnlineRLLoop({name}=...) is now {_NEW[name]}", FutureWarning, stacklevel=3)
    old = {name: value for name, value in given.items() if value is not None}
    plan = RunnerPlan.parse(runners) if isinstance(runners, str) else runners
    plan = replace(plan, **{new: old.pop(name) for name, new in _OF_PLAN.items() if name in old})
    return (_OldObserver(observer, old) if old else observer), plan


class _OldObserver:
    def __init__(self, observer: Observer | None, old: Mapping[str, Any]) -> None:
        self._observer, self._old = old.get("reporter", observer), old

    def handle(self, event: Event) -> None:
        if isinstance(event, GroupsCollected) and "on_groups" in self._old:
            self._old["on_groups"](event.iteration, event.groups)
        if isinstance(event, RunStarted):
            given = {new: self._old[name] for name, new in _OF_RUN_STARTED.items() if name in self._old}
            event = replace(event, **given)
        if self._observer is not None:
            self._observer.handle(event)
