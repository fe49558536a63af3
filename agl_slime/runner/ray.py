"""Runners as Ray actors: the same runner, on as many hosts as Ray has.

Ray is imported when a pool is made. A Ray that runs already is used (``RAY_ADDRESS``, or the one that this process is
connected to); otherwise a local one is started, and ended with the pool.
"""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import Any

from agl_slime.errors import ConfigError, LoopError, MissingDependencyError
from agl_slime.runner.worker import Worker, WorkerPool, WorkerSpec
from agl_slime.support.net import is_loopback

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 180.0
_LOOK_S = 0.5


class RunnerActor:
    """What runs in an actor; its methods are coroutines, so that ``stop`` is heard while ``run`` runs."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._worker = Worker(spec)

    async def ready(self) -> bool:
        return True

    async def run(self) -> None:
        await self._worker.run()

    async def wake(self) -> None:
        self._worker.runner.wake()

    async def stop(self, cancel: bool) -> None:
        self._worker.runner.stop(cancel=cancel)


@dataclass(slots=True)
class _Actor:
    name: str
    handle: Any
    running: Any


class RayPool(WorkerPool):
    """``count`` actors, each with one CPU reserved. Workers on other hosts must reach the store's address, so a Ray of
    several nodes needs another host than the loopback."""

    kind = "ray"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise MissingDependencyError(
                'runners on Ray need Ray: pip install "ray>=2.40", or use --runners process:N'
            ) from error
        self._actors: dict[str, _Actor] = {}
        self._own_ray = False

    def wake(self) -> None:
        for actor in self._all():
            actor.handle.wake.remote()

    def stop(self, *, cancel: bool = True, timeout_s: float = 10.0) -> bool:
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None
        actors = self._all()
        with self._changed:
            self._actors.clear()
        for actor in actors:
            actor.handle.stop.remote(cancel)
        unfinished: list[Any] = [actor.running for actor in actors]
        if actors:
            _, unfinished = self._ray.wait(unfinished, num_returns=len(actors), timeout=max(timeout_s, 0.001))
        for actor in actors:
            self._ray.kill(actor.handle)
            self._bury(actor.name, "the pool was stopped")
        self._close()
        if self._own_ray:
            self._own_ray = False
            self._ray.shutdown()
        if unfinished:
            logger.warning("%d of %d runner actors had to be ended.", len(unfinished), len(actors))
        return not unfinished

    def _all(self) -> list[_Actor]:
        with self._changed:
            return list(self._actors.values())

    def _open(self) -> None:
        if not self._ray.is_initialized():
            self._ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
            self._own_ray = True
        nodes = sum(bool(node.get("Alive")) for node in self._ray.nodes())
        if nodes > 1 and is_loopback(self._store_host):
            raise ConfigError(
                f"Ray has {nodes} nodes, and only this one reaches a store on {self._store_host}; "
                "give --store-host an address of this machine"
            )
        super()._open()

    def _launch(self, spec: WorkerSpec) -> None:
        handle = self._ray.remote(num_cpus=1, max_restarts=0)(RunnerActor).remote(spec)
        with self._changed:
            self._actors[spec.name] = _Actor(spec.name, handle, handle.run.remote())

    def _wait_for_the_first(self) -> None:
        ready, _ = self._ray.wait(
            [actor.handle.ready.remote() for actor in self._all()], num_returns=1, timeout=_START_TIMEOUT_S
        )
        if not ready:
            free = self._ray.available_resources().get("CPU", 0)
            raise LoopError(f"no runner actor was ready within {_START_TIMEOUT_S:g} s; Ray has {free:g} free CPUs")
        try:
            self._ray.get(ready)
        except self._ray.exceptions.RayError as error:
            raise LoopError(f"the runner actors could not start: {error}") from error

    def _watch(self) -> None:
        while not self._stopping.is_set() and (actors := self._all()):
            # in short looks: ray.wait cannot be woken
            ended, _ = self._ray.wait([actor.running for actor in actors], num_returns=1, timeout=_LOOK_S)
            for actor in actors:
                if actor.running in ended and not self._stopping.is_set():
                    self._ended(actor)

    def _ended(self, actor: _Actor) -> None:
        try:
            self._ray.get(actor.running)
            reason = "it returned"
        except self._ray.exceptions.RayError as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        with self._changed:
            del self._actors[actor.name]
        self._bury(actor.name, reason)
        if not self._stopping.wait(_LOOK_S):
            self._replace(reason, left=len(self._actors))
