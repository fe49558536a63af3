"""An environment of verifiers, as a run or a program sees it: its tasks, its agents, and who plays its episodes.

env = load_environment("reasoning-gym:chain_sum", python="envs/vf/bin/python", arguments=["--env.taskset.size", "500"])
OnlineRLLoop(agent=None, tasks=env.tasks, val_tasks=env.val_tasks, runners=env.plan(), …)
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import agl_slime
from agl_slime.agl1.settings import KEY_VARIABLE, ControllerSettings, WorkerCommand
from agl_slime.errors import ConfigError
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.runner.base import RunnerPlan, RunnerSettings
from agl_slime.support.files import write_file

PYTHON_VARIABLE = "AGL_ENV_PYTHON"
"""Names a Python that has verifiers."""
_FIX = "make one with `bash scripts/verifiers_env.sh DIR`: DIR/bin/python"
_DESCRIBE_S = 300.0
_MOST_OF_ENDLESS = 1000
_POLL_S = 0.1  # each look is a request to the run
_LAST_WORDS = 6
_NO_VERIFIERS = 3  # the worker's exit code
# Loads this package, and nothing else of the Python that it is installed in.
_BOOT = """
import importlib.util, runpy, sys
home = sys.argv[1]
spec = importlib.util.spec_from_file_location("agl_slime", home + "/__init__.py", submodule_search_locations=[home])
sys.modules["agl_slime"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
del sys.argv[1]
runpy.run_module("agl_slime.environments.worker", run_name="__main__")
"""

Task = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """``name``: a taskset that verifiers finds, or one of this package's (``reasoning-gym:NAME``, ``textarena:ID``).
    ``python`` has verifiers. ``arguments`` are those of verifiers' own programs: ``--env.KEY value``, ``@ FILE.toml``.
    ``eval_split``: the value of the taskset's ``split`` for validations, where it is not found by itself.
    ``most_tasks`` limits each split. ``models``: agents that another address answers, as ROLE=URL or ROLE=MODEL@URL.
    ``trained`` and ``untrained``: agents by name, where it is to be otherwise than the environment has it. ``workers``:
    processes, each with at most ``max_concurrent`` episodes. ``keep_traces``: verifiers' record of each
    episode is kept beside the worker's log, as environment/ROLLOUT.json."""

    name: str
    python: Path
    arguments: tuple[str, ...] = ()
    eval_split: str | None = None
    most_tasks: int | None = None
    models: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
    workers: int = 1
    max_concurrent: int = 1024
    keep_traces: bool = False

    @classmethod
    def given(cls, name: str, *, python: str | Path | None = None, **others: Any) -> EnvironmentSettings:
        """With the Python that AGL_ENV_PYTHON names, where none is. Raises ``ConfigError``."""
        named = python or os.environ.get(PYTHON_VARIABLE)
        if not named:
            raise ConfigError(f"--env {name}: needs --env-python ({PYTHON_VARIABLE}), a Python with verifiers; {_FIX}")
        return cls(name=name, python=Path(named), **others)

    @property
    def others(self) -> dict[str, tuple[str, str]]:
        """Model and address of agents that are answered elsewhere. Raises ``ConfigError``."""
        found = {}
        for one in self.models:
            role, _, where = one.partition("=")
            model, _, url = where.rpartition("@") if "@" in where.partition("//")[0] else ("", "", where)
            if not role or not url.startswith(("http://", "https://")):
                raise ConfigError(f"--env-model {one}: expected ROLE=URL or ROLE=MODEL@URL")
            found[role] = (model or role, url)
        return found


@dataclass(frozen=True, kw_only=True)
class Environment:
    """``val_tasks`` are those of the taskset's own split, or of ``tasks`` those that ``held_out`` counts; no task is in
    both. ``trained`` are the agents whose turns are trained, of several each with rewards of its own; the policy
    answers ``untrained``."""

    settings: EnvironmentSettings
    env_id: str
    tasks: list[Task]
    val_tasks: list[Task] | None
    held_out: int
    trained: list[str]
    untrained: list[str]
    summary: str
    spec: Mapping[str, Any] = field(repr=False)

    @property
    def digest(self) -> str:
        """Of all tasks, in their order."""
        parts = [task["digest"] for task in (*self.tasks, *(self.val_tasks or ()))]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def gateway(self, settings: GatewaySettings | None = None) -> GatewaySettings:
        """With the agents of this environment by their model names."""
        settings = settings or GatewaySettings()
        several = tuple(self.trained) if len(self.trained) > 1 else ()
        return replace(settings, untrained_models=tuple(self.untrained), trained_models=several)

    def controller(self, *, log: Path | None = None, **others: Any) -> ControllerSettings:
        """What plays this environment's episodes. Beside its log is what a worker on another host is given
        (docs/environments.md)."""
        spec = {**self.spec, "trained": self.trained}
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            write_file(log.with_name("environment.json"), json.dumps(spec).encode())
        if self.settings.keep_traces and log is not None:
            spec["traces"] = str(log.resolve().parent / "environment")
        command = WorkerCommand(
            name="the environment's worker",
            argv=tuple(_command(self.settings, "work", spec)),
            count=self.settings.workers,
        )
        return ControllerSettings(
            python=self.settings.python, worker=command, key=os.environ.get(KEY_VARIABLE) or None, log=log, **others
        )

    def plan(self, *, settings: RunnerSettings | None = None, log: Path | None = None, **others: Any) -> RunnerPlan:
        """For ``OnlineRLLoop(runners=…)``; ``others`` are of ``ControllerSettings``: host and port."""
        settings = settings or RunnerSettings()
        settings = replace(settings, gateway=self.gateway(settings.gateway))
        return RunnerPlan(kind="controller", settings=settings, controller=self.controller(log=log, **others))


def check_python(python: Path) -> str:
    """The version of its verifiers. Raises ``ConfigError`` when it has none."""
    program = "from importlib.metadata import version; print(version('verifiers'))"
    try:
        asked = subprocess.run([str(python), "-c", program], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"--env-python ({PYTHON_VARIABLE}) {python}: no verifiers in it ({error}); {_FIX}") from None
    return asked.stdout.strip()


def load_environment(
    name: str,
    *,
    python: str | Path | None = None,
    seed: int = 0,
    held_out: int | None = None,
    validate: bool = True,
    **settings: Any,
) -> Environment:
    """Ask the Python that has verifiers (``python``, or AGL_ENV_PYTHON) what the environment ``name`` is. Seconds.

    Validations get the taskset's own split; where it has none, ``held_out`` tasks that the ``seed`` chooses (a tenth).
    Other ``settings`` are those of ``EnvironmentSettings``. Raises ``ConfigError`` with what verifiers said."""
    chosen = EnvironmentSettings.given(name, python=python, **settings)
    spec: dict[str, Any] = {
        "name": name,
        "arguments": list(chosen.arguments),
        "eval_split": chosen.eval_split,
        "most_tasks": chosen.most_tasks,
        "most_of_endless": _MOST_OF_ENDLESS,
        "others": chosen.others,
        "max_concurrent": chosen.max_concurrent,
        "workers": chosen.workers,
        "poll_interval_s": _POLL_S,
    }
    found = _ask(chosen, spec)
    agents: dict[str, bool] = found["agents"]
    for flag, names in (("trained", chosen.trained), ("untrained", chosen.untrained), ("env-model", chosen.others)):
        if unknown := set(names) - agents.keys():
            known = ", ".join(agents)
            raise ConfigError(f"--{flag} {', '.join(sorted(unknown))}: the agents of {name} are {known}")
    seats = {role: role in chosen.trained or (own and role not in chosen.untrained) for role, own in agents.items()}
    trained = [role for role, own in seats.items() if own and role not in chosen.others]
    untrained = [role for role in agents if role not in trained and role not in chosen.others]
    if not trained:
        raise ConfigError(f"--env {name}: none of its agents ({', '.join(agents)}) is trained")
    tasks, val_tasks, out, how = _split(found["tasks"], seed=seed, held_out=held_out, validate=validate, name=name)
    lines = [f"{name} ({found['env_id']}, verifiers {found['verifiers']}): {len(tasks)} tasks{how}"]
    if found["endless"] and not chosen.most_tasks:
        lines.append(f"its tasks do not end, the first {_MOST_OF_ENDLESS} are taken (--env-tasks N)")
    if found["room"] is not None and found["room"] < chosen.max_concurrent * chosen.workers:
        lines.append(f"{found['room']} episodes at once, as many sandboxes as memory and processes here hold")
    answered = [f"{role} by {url}" for role, (_, url) in chosen.others.items()]
    if untrained or answered or len(trained) > 1:
        told = [f"trained: {', '.join(trained)}", *([f"untrained: {', '.join(untrained)}"] if untrained else [])]
        lines.append("; ".join([*told, *([f"answered elsewhere: {', '.join(answered)}"] if answered else [])]))
    return Environment(
        settings=chosen,
        env_id=found["env_id"],
        tasks=tasks,
        val_tasks=val_tasks,
        held_out=out,
        trained=trained,
        untrained=untrained,
        summary="; ".join(lines),
        spec=spec,
    )


def _split(
    found: Mapping[str, Sequence[Task]], *, seed: int, held_out: int | None, validate: bool, name: str
) -> tuple[list[Task], list[Task] | None, int, str]:
    """Tasks, those of validations, how many of the former were held out for the latter, and in words how."""
    tasks = list(found["train"])
    if not tasks:
        raise ConfigError(f"--env {name}: it gives no tasks")
    if "eval" in found:  # whoever asks later how good the model is finds that split unseen
        val_tasks = list(found["eval"])
        out = {task["digest"] for task in val_tasks}
        kept = [task for task in tasks if task["digest"] not in out]
        if not kept or (validate and not val_tasks):
            raise ConfigError(f"--env {name}: of its own splits nothing is left to train on or to validate with")
        also = f", {len(tasks) - len(kept)} left out that are in both" if len(kept) < len(tasks) else ""
        if not validate:
            return kept, None, 0, also
        return kept, val_tasks, 0, f", and {len(val_tasks)} of its own split for validations{also}"
    if not validate:
        return tasks, None, 0, ""
    digests = sorted({task["digest"] for task in tasks})
    wanted = max(1, len(digests) // 10) if held_out is None else held_out
    if wanted >= len(digests):
        fix = "give more tasks, or --eval-interval 0"
        raise ConfigError(f"--env {name}: of {len(digests)} tasks {wanted} cannot be held out for validations; {fix}")
    key = f"{seed}:held out:"
    out = set(sorted(digests, key=lambda one: hashlib.sha256(f"{key}{one}".encode()).digest())[:wanted])
    val_tasks = [task for task in tasks if task["digest"] in out]
    kept = [task for task in tasks if task["digest"] not in out]
    return kept, val_tasks, len(val_tasks), f", and {len(val_tasks)} held out for validations by the seed"


def _command(settings: EnvironmentSettings, what: str, spec: Mapping[str, Any]) -> Iterable[str]:
    home = str(Path(agl_slime.__file__).parent)
    return str(settings.python), "-P", "-c", _BOOT, home, what, "--spec", json.dumps(spec)


def _ask(settings: EnvironmentSettings, spec: Mapping[str, Any]) -> Any:
    named = f"--env-python ({PYTHON_VARIABLE}) {settings.python}"
    try:
        asked = subprocess.run(
            [*_command(settings, "describe", spec)], capture_output=True, text=True, timeout=_DESCRIBE_S, check=False
        )
    except OSError as error:
        raise ConfigError(f"{named}: it cannot be run as a Python ({error}); {_FIX}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--env {settings.name}: it did not list its tasks within {_DESCRIBE_S:g} s") from None
    if asked.returncode:
        words = " ".join(asked.stderr.strip().splitlines()[-_LAST_WORDS:])
        where = f" ({named}; {_FIX})" if asked.returncode == _NO_VERIFIERS else ""
        raise ConfigError(f"--env {settings.name}: {words or 'no reason was given'}{where}")
    return json.loads(asked.stdout)
