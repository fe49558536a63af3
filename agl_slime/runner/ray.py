"""``RayPool``: runners as Ray actors, on all hosts of a Ray cluster.

Ray is imported when a pool is made. The pool uses a running Ray (``RAY_ADDRESS``, or this process's connection);
otherwise it starts a local one and ends it.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from agl_slime.errors import ConfigError, LoopError, missing_as_error
from agl_slime.runner.worker import Command, Worker, WorkerPool, WorkerSpec
from agl_slime.support.net import is_loopback

logger = logging.getLogger(__name__)

_PLACE_S = 60.0
"""Seconds without a place for a runner after which a warning says so: Ray itself waits for ever."""


def require_reachable(ray: Any, host: str, *, setting: str) -> None:
    """Raise ``ConfigError``, which names the ``setting`` of ``host``, when some node of Ray cannot reach it."""
    nodes = sum(bool(node.get("Alive")) for node in ray.nodes())
    if nodes > 1 and is_loopback(host):
        why = f"Ray has {nodes} nodes, and only this one reaches a store on {host}"
        raise ConfigError(f"{why}; give {setting} an address of this machine, or 0.0.0.0")


class RayPool(WorkerPool):
    """``count`` actors, each with one CPU reserved. With several nodes the store needs an address other than the
    loopback, which all workers can reach."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        with missing_as_error('runners on Ray need Ray: pip install "ray>=2.40", or use --runners process:N'):
            self._ray: Any = importlib.import_module("ray")
        self._started_ray = False
        self._placed: set[int] = set()  # ids of the handles of actors that have started

    def _open(self) -> None:
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
            self._started_ray = True
        require_reachable(self._ray, self._plan.store_host, setting=self._plan.store_setting)
        super()._open()

    def _close(self) -> None:
        super()._close()
        if self._started_ray:
            self._started_ray = False
            self._ray.shutdown()

    def _shortage(self) -> str:
        return f"; Ray has {self._ray.available_resources().get('CPU', 0):g} free CPUs"

    def _launch(self, spec: WorkerSpec) -> Any:
        return self._ray.remote(num_cpus=1, max_restarts=0)(Worker).remote(spec)

    def _wait_for_end(self, worker: Any) -> tuple[str, str]:
        try:
            ready = worker.__ray_ready__.remote()
            if not self._ray.wait([ready], timeout=_PLACE_S)[0]:
                logger.warning("A runner (ray) has not started within %g s%s.", _PLACE_S, self._shortage())
            self._ray.get(ready)
            self._placed.add(id(worker))
            self._supervisor.note_ready()
            self._ray.get(worker.run.remote())
            reason = "it returned"
        except self._ray.exceptions.RayError as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            if not self._supervisor.ready:
                self._supervisor.fail(LoopError(f"an actor ended before it was ready: {error}"))
        self._kill(worker)  # an actor stays alive after its method returns
        self._placed.discard(id(worker))
        return reason, ""

    def _send(self, worker: Any, command: Command) -> None:
        if command == "wake" or id(worker) in self._placed:
            worker.execute.remote(command)
        else:  # it would take the place of one that ends, and start only to end
            self._kill(worker)

    def _kill(self, worker: Any) -> None:
        self._ray.kill(worker)
