"""What a controller of Agent Lightning 1.0 is to run, and where it finds this process."""

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
"""Holds the key of Agent Lightning 1.0's server; this package reads it where no key is given."""
PYTHON_VARIABLE = "AGL_CONTROLLER_PYTHON"
"""Names a Python that has agentlightning 1.x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCommand:
    """Somebody else who takes rollouts as a controller does: ``argv``, to which ``--url URL`` is added, started
    ``count`` times. ``name`` is what errors call it."""

    name: str
    argv: tuple[str, ...]
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """``agent``: the class that the local controller runs, as ``module:Class`` importable by its Python, and
    ``env_map``, which of its environment variables come from where in a task (``QUESTION`` from ``input.question``).
    ``job_template``: for its Kubernetes runner, a file with the Jinja template of a Job. ``worker``: what is started in
    the controller's place, with its own agents. One of the three is needed.

    ``python``: a Python that has agentlightning 1.x, whose controller is started as a child and ended with the run;
    ``None`` waits for a controller that somebody else starts. It runs at most ``max_processes`` agents at once and
    looks for new rollouts every ``poll_interval_s`` seconds; one that dies is started again, at most ``max_restarts``
    times without a rollout that succeeds between. What the child and its agents write is appended to ``log``; without
    one only the last lines are kept.

    ``host``, ``port`` (0 takes a free one) and ``key`` are those of the API. Without a key a child gets a random one
    (some clients refuse an empty one), and everybody on this machine may ask; another address needs a key.
    """

    agent: str | None = None
    env_map: Mapping[str, str] = field(default_factory=dict)
    job_template: Path | None = None
    worker: WorkerCommand | None = None
    python: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    key: str | None = None
    max_processes: int = 50
    poll_interval_s: float = 0.5
    max_restarts: int = 3
    log: Path | None = None

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
        """As a person gives them: ``env_map`` as NAME=input.path, and from the environment the key, and the Python of
        an ``agent`` where none is named. Raises ``ConfigError``."""
        named = environ.get(PYTHON_VARIABLE) if job_template is None else None
        return cls(
            agent=agent,
            env_map={name: path for name, _, path in (one.partition("=") for one in env_map)},
            job_template=job_template,
            python=python or (Path(named) if named else None),
            key=environ.get(KEY_VARIABLE) or None,
            **others,
        )

    def __post_init__(self) -> None:
        if sum(one is not None for one in (self.agent, self.job_template, self.worker)) != 1:
            raise ConfigError("a controller runs either an agent (module:Class) or Jobs of a job template: give one")
        if self.agent is not None and not all(self.agent.partition(":")):
            raise ConfigError(f"agent {self.agent!r}: a controller imports a class as module:Class")
        for name, path in self.env_map.items():
            if not name.isidentifier() or not path:
                raise ConfigError(f"env_map {name}={path}: expected NAME=input.path")
        if self.python is not None and self.job_template is not None:
            raise ConfigError("a controller for Kubernetes is started beside the cluster, not as a child: leave python")
        require_token(self.host, self.key, setting=KEY_VARIABLE)
        check_ranges(
            self,
            ("port", lambda value: 0 <= value <= 65_535, "from 0, which takes a free one, to 65535"),
            ("max_processes", lambda value: value >= 1, "at least 1"),
            ("poll_interval_s", lambda value: value > 0, "above 0 seconds"),
            ("max_restarts", lambda value: value >= 0, "0 or more"),
        )
