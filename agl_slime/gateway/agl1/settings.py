"""``ControllerSettings``: agent, address and limits of a controller of Agent Lightning 1.0."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from agl_slime.errors import ConfigError
from agl_slime.support.net import require_token
from agl_slime.support.ranges import check_ranges

KEY_VARIABLE = "AGL_KEY"
"""Environment variable with the key of Agent Lightning 1.0's server."""
PYTHON_VARIABLE = "AGL_CONTROLLER_PYTHON"
"""Environment variable with a Python that has agentlightning 1.x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """A program that takes rollouts in place of a controller: ``argv`` plus ``--url URL``, with the variables ``env``
    beside this process's, started ``count`` times. ``name`` stands in errors."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """Settings of a controller: a run needs one of ``agent``, ``job_template`` and ``worker``, and takes no second."""

    agent: str | None = None
    """Class that the local controller runs, as ``module:Class``, importable by its Python."""
    env_map: tuple[str, ...] = ()
    """Environment variables of the agent, filled from its task, as NAME=input.path."""
    job_template: Path | None = None
    """Jinja template of a Job, for a controller on Kubernetes."""
    worker: WorkerCommand | None = None
    """Program that is started in place of the controller, with other agents."""
    python: Path | None = None
    """A Python with agentlightning 1.x, whose controller is started and ended with the run, by default
    AGL_CONTROLLER_PYTHON's; without one the run waits for a controller."""
    host: str = "127.0.0.1"
    """Address at which a controller, or an environment's worker, reaches the run; other than loopback needs AGL_KEY."""
    port: int = 0
    """Port on the controller's host; 0 takes a free one."""
    key: str | None = field(default_factory=lambda: os.environ.get(KEY_VARIABLE) or None)
    """Key of the API, by default AGL_KEY's. A child without one gets a random key: some clients refuse an empty one."""
    max_processes: int = 50
    """Most agents that the child runs at once."""
    max_restarts: int = 3
    """Most restarts of a dead child without a successful rollout in between."""
    log: Path | None = None
    """File to which output of the child and its agents is appended; ``None`` keeps the last lines only."""

    @property
    def env_paths(self) -> dict[str, str]:
        """The paths of ``env_map`` by their variables."""
        return {name: path for name, _, path in (pair.partition("=") for pair in self.env_map)}

    def complete(self, *, agent: str | None, log: Path | None = None) -> Self:
        """The settings of a run of ``agent``, or of the Jobs of ``job_template``: the Python for an agent without
        one is AGL_CONTROLLER_PYTHON's. Raises ``ConfigError``."""
        if (agent, self.job_template).count(None) == 2:
            raise ConfigError("a controller runs either an agent (module:Class) or Jobs of a job template: give one")
        default_python = os.environ.get(PYTHON_VARIABLE) if self.job_template is None else None
        return replace(
            self,
            agent=agent if self.job_template is None else None,
            python=self.python or (Path(default_python) if default_python else None),
            log=log or self.log,
        )

    def __post_init__(self) -> None:
        if (self.agent, self.job_template, self.worker).count(None) < 2:
            raise ConfigError("a controller runs either an agent (module:Class) or Jobs of a job template: give one")
        if self.agent is not None and not all(self.agent.partition(":")):
            raise ConfigError(f"agent {self.agent!r}: a controller imports a class as module:Class")
        for name, path in self.env_paths.items():
            if not name.isidentifier() or not path:
                raise ConfigError(f"env_map {name}={path}: expected NAME=input.path")
        if self.python is not None and self.job_template is not None:
            message = "a controller for Kubernetes is started beside the cluster, not as a child: leave out python"
            raise ConfigError(message)
        require_token(self.host, self.key, setting=KEY_VARIABLE)
        check_ranges(
            self,
            ("port", lambda value: 0 <= value <= 65_535, "from 0, which takes a free one, to 65535"),
            ("max_processes", lambda value: value >= 1, "at least 1"),
            ("max_restarts", lambda value: value >= 0, "0 or more"),
        )
