"""``load_environment``: an environment of verifiers as tasks and runners for a training run.

env = load_environment("reasoning-gym:chain_sum", python="envs/vf/bin/python", arguments=["--env.taskset.size", "500"])
OnlineRLLoop(agent=None, tasks=env.tasks, val_tasks=env.val_tasks, runners=env.plan(), …)
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from agl_slime.errors import ConfigError
from agl_slime.gateway.agl1.settings import ControllerSettings, WorkerCommand
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.runner.base import RunnerPlan, RunnerSettings
from agl_slime.support.files import CACHE_VARIABLE, cache_directory, write_file
from agl_slime.support.net import shown_url
from agl_slime.support.other_python import installed_version
from agl_slime.support.ranges import check_ranges

PYTHON_VARIABLE = "AGL_ENV_PYTHON"
"""The environment variable with the path of a Python that has verifiers."""
_FIX = "make one with `bash scripts/verifiers_env.sh DIR`: DIR/bin/python"
_SETTING = f"--env-python ({PYTHON_VARIABLE})"
_DESCRIBE_S = 300.0
_MOST_OF_ENDLESS = 1000
_POLL_S = 0.1  # each poll is a request to the run
_ERROR_LINES = 6
_NO_VERIFIERS = 3  # the worker's exit code
_WORKER = "agl_slime.environments.worker"

Task = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """An environment and how to run it."""

    name: str | None = None
    """The environment, instead of --agent and --tasks: a taskset's name, reasoning-gym:NAME, textarena:ID or
    bfcl:CATEGORY."""
    python: Path | None = None
    """A Python with verifiers, by default AGL_ENV_PYTHON's; `bash scripts/verifiers_env.sh DIR` makes one:
    DIR/bin/python."""
    arguments: tuple[str, ...] = ()
    """Arguments of verifiers' programs: ``--env.KEY value``, ``@ FILE.toml``."""
    eval_split: str | None = None
    """Split of the tasks for validations, if its name is not a usual one (eval, test, ...)."""
    most_tasks: int | None = None
    """Most tasks of the environment; by default all, or 1000 of an endless one."""
    models: tuple[str, ...] = ()
    """Agents of the environment that another server answers, as ROLE=URL or ROLE=MODEL@URL; AGL_ENV_MODEL_KEY has the
    key."""
    trained: tuple[str, ...] = ()
    untrained: tuple[str, ...] = ()
    """Agents by name, to override which ones the environment trains."""
    workers: int = 1
    """Processes, each with at most ``max_concurrent`` episodes."""
    max_concurrent: int = 1024
    keep_traces: bool = False
    """Keep verifiers' record of each episode beside the worker's log, as environment/ROLLOUT.json."""

    def __post_init__(self) -> None:
        for mark, path in pairwise(self.arguments):
            if mark == "@" and not Path(path).is_file():
                raise ConfigError(f"--env.@ {path}: give a regular file, which each worker reads")
        check_ranges(
            self,
            ("most_tasks", lambda value: value >= 2, "at least 2"),
            ("workers max_concurrent", lambda value: value >= 1, "at least 1"),
        )

    def complete(self) -> Self:
        """The same with a ``python``, by default AGL_ENV_PYTHON's. Raises ``ConfigError``."""
        python = self.python or os.environ.get(PYTHON_VARIABLE)
        if not python:
            raise ConfigError(f"--env {self.name}: needs {_SETTING}, a Python with verifiers; {_FIX}")
        return replace(self, python=Path(python))

    @property
    def served_models(self) -> dict[str, tuple[str, str]]:
        """Model and address of each agent of ``models``. Raises ``ConfigError``."""
        served = {}
        for entry in self.models:
            role, _, address = entry.partition("=")
            model, _, url = address.rpartition("@") if "@" in address.partition("//")[0] else ("", "", address)
            if not role or not url.startswith(("http://", "https://")):
                raise ConfigError(f"--env-model {shown_url(entry)}: expected ROLE=URL or ROLE=MODEL@URL")
            served[role] = (model or role, url)
        return served


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A loaded environment. ``val_tasks`` come from the taskset's validation split, or are ``held_out`` tasks of its
    training split; no task is in both lists. The policy also plays ``untrained`` agents, whose turns are not trained;
    several ``trained`` agents each have their own rewards."""

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
        """The digest of all tasks, in order."""
        digests = [task["digest"] for task in (*self.tasks, *(self.val_tasks or ()))]
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()

    def plan(
        self,
        *,
        settings: RunnerSettings | None = None,
        controller: ControllerSettings | None = None,
        log: Path | None = None,
    ) -> RunnerPlan:
        """The plan for ``OnlineRLLoop(runners=…)``; ``controller`` has the address for the workers that play this
        environment's episodes. A worker on another host needs the file environment.json beside ``log``
        (docs/environments.md)."""
        settings = settings or RunnerSettings()
        agents = {"untrained_models": tuple(self.untrained)}  # which the gateway knows by model name
        agents["trained_models"] = tuple(self.trained) if len(self.trained) > 1 else ()
        settings = replace(settings, gateway=replace(settings.gateway or GatewaySettings(), **agents))
        spec = {**self.spec, "trained": self.trained}
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            write_file(log.with_name("environment.json"), json.dumps(spec).encode())
            spec |= {"traces": str(log.resolve().parent / "environment")} if self.settings.keep_traces else {}
        worker = WorkerCommand(
            name="the environment's worker",
            argv=_command(self.settings, "work", spec),
            env=_variables(),
            count=self.settings.workers,
        )
        controller = replace(controller or ControllerSettings(), python=self.settings.python, worker=worker, log=log)
        return RunnerPlan(kind="controller", settings=settings, controller=controller)


def check_python(python: Path) -> str:
    """The version of verifiers in ``python``. Raises ``ConfigError`` without one."""
    return installed_version(python, "verifiers", setting=_SETTING, fix=_FIX)


def load_environment(
    name: str | EnvironmentSettings,
    *,
    python: str | Path | None = None,
    seed: int = 0,
    held_out: int | None = None,
    validate: bool = True,
    **settings: Any,
) -> Environment:
    """Load the environment ``name`` in a Python with verifiers (``python``, or AGL_ENV_PYTHON). Takes seconds.

    Validations use the taskset's validation split, or without one ``held_out`` tasks (by default a tenth) chosen by
    ``seed``. Other ``settings`` are fields of ``EnvironmentSettings``, which may be given in place of ``name``. Raises
    ``ConfigError`` with verifiers' error."""
    if not isinstance(name, EnvironmentSettings):
        name = EnvironmentSettings(name=name, python=None if python is None else Path(python), **settings)
    chosen = name.complete()
    env_name, served = str(chosen.name), chosen.served_models
    spec: dict[str, Any] = {
        "name": env_name,
        "arguments": list(chosen.arguments),
        "eval_split": chosen.eval_split,
        "most_tasks": chosen.most_tasks,
        "most_of_endless": _MOST_OF_ENDLESS,
        "others": served,
        "max_concurrent": chosen.max_concurrent,
        "workers": chosen.workers,
        "poll_interval_s": _POLL_S,
    }
    description = _describe(chosen, spec)
    agents: dict[str, bool] = description["agents"]
    for flag, names in (("trained", chosen.trained), ("untrained", chosen.untrained), ("env-model", served)):
        if unknown := set(names) - agents.keys():
            listed = ", ".join(agents)
            raise ConfigError(f"--{flag} {', '.join(sorted(unknown))}: the agents of {env_name} are {listed}")
    trained = [
        role
        for role, trainable in agents.items()
        if (role in chosen.trained or (trainable and role not in chosen.untrained)) and role not in served
    ]
    untrained = [role for role in agents if role not in trained and role not in served]
    if not trained:
        raise ConfigError(f"--env {env_name}: none of its agents ({', '.join(agents)}) is trained")
    tasks, val_tasks, n_held_out, split_text = _split(
        description["tasks"], seed=seed, held_out=held_out, validate=validate, name=env_name
    )
    about = f"{env_name} ({description['env_id']}, verifiers {description['verifiers']})"
    lines = [f"{about}: {len(tasks)} tasks{split_text}"]
    if description["endless"] and not chosen.most_tasks:
        lines.append(f"its taskset is endless, the first {_MOST_OF_ENDLESS} tasks are taken (--env-tasks N)")
    most_episodes = description["most_episodes"]
    if most_episodes is not None and most_episodes < chosen.max_concurrent * chosen.workers:
        lines.append(f"at most {most_episodes} episodes at a time: memory and processes suffice for no more sandboxes")
    elsewhere = [f"{role} at {shown_url(url)}" for role, (_, url) in served.items()]
    if untrained or elsewhere or len(trained) > 1:
        roles = [f"trained: {', '.join(trained)}"]
        roles += [f"untrained: {', '.join(untrained)}"] if untrained else []
        roles += [f"other models: {', '.join(elsewhere)}"] if elsewhere else []
        lines.append("; ".join(roles))
    return Environment(
        settings=chosen,
        env_id=description["env_id"],
        tasks=tasks,
        val_tasks=val_tasks,
        held_out=n_held_out,
        trained=trained,
        untrained=untrained,
        summary="; ".join(lines),
        spec=spec,
    )


def _split(
    splits: Mapping[str, Sequence[Task]], *, seed: int, held_out: int | None, validate: bool, name: str
) -> tuple[list[Task], list[Task] | None, int, str]:
    """The training tasks, the validation tasks, the number of tasks held out for them, and a text about the split."""
    tasks = list(splits["train"])
    if not tasks:
        raise ConfigError(f"--env {name}: it has no tasks")
    if "eval" in splits:  # also without validations: the split stays unseen for a later evaluation
        val_tasks = list(splits["eval"])
        unseen = {task["digest"] for task in val_tasks}
        training = [task for task in tasks if task["digest"] not in unseen]
        if not training or (validate and not val_tasks):
            raise ConfigError(f"--env {name}: its splits leave no task to train on, or none to validate with")
        in_both = len(tasks) - len(training)
        left_out = f", {in_both} left out that are in both" if in_both else ""
        if not validate:
            return training, None, 0, left_out
        return training, val_tasks, 0, f", and {len(val_tasks)} of its validation split{left_out}"
    if not validate:
        return tasks, None, 0, ""
    digests = sorted({task["digest"] for task in tasks})
    n_held_out = max(1, len(digests) // 10) if held_out is None else held_out
    if n_held_out >= len(digests):
        problem = f"{n_held_out} of {len(digests)} tasks cannot be held out for validations"
        raise ConfigError(f"--env {name}: {problem}; give more tasks, or --eval-interval 0")
    key = f"{seed}:held out:"
    chosen = set(sorted(digests, key=lambda digest: hashlib.sha256(f"{key}{digest}".encode()).digest())[:n_held_out])
    val_tasks = [task for task in tasks if task["digest"] in chosen]
    training = [task for task in tasks if task["digest"] not in chosen]
    return training, val_tasks, len(val_tasks), f", and {len(val_tasks)} held out for validations by the seed"


def _command(settings: EnvironmentSettings, command: str, spec: Mapping[str, Any]) -> tuple[str, ...]:
    return str(settings.python), "-P", "-m", _WORKER, command, "--spec", json.dumps(spec)


def _variables() -> dict[str, str]:
    """The variables with which another Python finds this package, in this version, whatever is installed there."""
    inherited = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(_package_alone()), *([inherited] if inherited else [])])}


def _package_alone() -> Path:
    """A directory with this package alone, in the cache: the one that it is in would bring this Python's other packages
    along. Raises ``ConfigError`` when it cannot be written."""
    package = Path(__file__).resolve().parents[1]
    directory = cache_directory() / f"package-{hashlib.sha256(bytes(package)).hexdigest()[:16]}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (directory / package.name).symlink_to(package)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be written ({error}): name another one in {CACHE_VARIABLE}") from error
    return directory


def _describe(settings: EnvironmentSettings, spec: Mapping[str, Any]) -> Any:
    named = f"{_SETTING} {settings.python}"
    try:
        completed = subprocess.run(
            _command(settings, "describe", spec),
            env={**os.environ, **_variables()},
            capture_output=True,
            text=True,
            timeout=_DESCRIBE_S,
            check=False,
        )
    except OSError as error:
        raise ConfigError(f"{named}: it does not run as a Python ({error}); {_FIX}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"--env {settings.name}: it did not list its tasks within {_DESCRIBE_S:g} s") from None
    if completed.returncode:
        error_text = " ".join(completed.stderr.strip().splitlines()[-_ERROR_LINES:])
        fix = f" ({named}; {_FIX})" if completed.returncode == _NO_VERIFIERS else ""
        raise ConfigError(f"--env {settings.name}: {error_text or 'no reason was given'}{fix}")
    return json.loads(completed.stdout)
