"""``ControllerSettings``: agent, address and limits of a controller of Agent Lightning 1.0."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

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
    """One of ``agent``, ``job_template`` and ``worker`` is needed."""

    agent: str | None = None
    """Class that the local controller runs, as ``module:Class``, importable by its Python."""
    env_map: Mapping[str, str] = field(default_factory=dict)
    """The agent's environment variables by path in a task: ``QUESTION`` from ``input.question``."""
    job_template: Path | None = None
    """File with the Jinja template of a Job, for the Kubernetes controller."""
    worker: WorkerCommand | None = None
    """Program that is started in place of the controller, with other agents."""
    python: Path | None = None
    """A Python with agentlightning 1.x: its controller is started as a child and stopped with the run. ``None`` waits
    for a controller that was started elsewhere."""
    host: str = "127.0.0.1"
    """Address of the API to bind; an address other than loopback needs a ``key``."""
    port: int = 0
    """Port of the API; 0 takes a free one."""
    key: str | None = None
    """Key of the API. A child without one gets a random key, since some clients refuse an empty key."""
    max_processes: int = 50
    """Most agents that the child runs at once."""
    poll_interval_s: float = 0.5
    """Seconds between the child's polls for new rollouts."""
    max_restarts: int = 3
    """Most restarts of a dead child without a successful rollout in between."""
    log: Path | None = None
    """File to which output of the child and its agents is appended; ``None`` keeps the last lines only."""

    @classmethod
    def given(
        cls,
        *,
        agent: str | None,
        job_template: Path | None,
        python: Path | None,
        env_map: Iterable[str],
        environ: Mapping[str, str] = os.environ,
        **others: Any,
    ) -> Self:
        """Settings from command-line values: ``env_map`` as NAME=input.path; the key, and the Python for an ``agent``
        without one, come from the environment. Raises ``ConfigError``."""
        default_python = environ.get(PYTHON_VARIABLE) if job_template is None else None
        return cls(
            agent=agent,
            env_map={name: path for name, _, path in (pair.partition("=") for pair in env_map)},
            job_template=job_template,
            python=python or (Path(default_python) if default_python else None),
            key=environ.get(KEY_VARIABLE) or None,
            **others,
        )

    def __post_init__(self) -> None:
        if (self.agent, self.job_template, self.worker).count(None) != 2:
            raise ConfigError("a controller runs either an agent (module:Class) or Jobs of a job template: give one")
        if self.agent is not None and not all(self.agent.partition(":")):
            raise ConfigError(f"agent {self.agent!r}: a controller imports a class as module:Class")
        for name, path in self.env_map.items():
            if not name.isidentifier() or not path:
                raise ConfigError(f"env_map {name}={path}: expected NAME=input.path")
        if self.python is not None and self.job_template is not None:
            raise ConfigError(
                "a controller for Kubernetes is started beside the cluster, not as a child: leave out python"
            )
        require_token(self.host, self.key, setting=KEY_VARIABLE)
        check_ranges(
            self,
            ("port", lambda value: 0 <= value <= 65_535, "from 0, which takes a free one, to 65535"),
            ("max_processes", lambda value: value >= 1, "at least 1"),
            ("poll_interval_s", lambda value: value > 0, "above 0 seconds"),
            ("max_restarts", lambda value: value >= 0, "0 or more"),
        )
