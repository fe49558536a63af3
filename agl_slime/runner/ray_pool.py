"""Runners as Ray actors: the same runner, on as many hosts as Ray has.

Ray is imported when a pool is made. A Ray that runs already is used (``RAY_ADDRESS``, or the one that this process is
connected to); otherwise a local one is started, and ended with the pool.
"""

from __future__ import annotations

import importlib
import ipaddress
import logging
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agl_slime.errors import ConfigError, LoopError, MissingDependencyError
from agl_slime.runner.concurrent import RunnerSettings
from agl_slime.runner.worker import Worker, WorkerSpec
from agl_slime.support.agl import LitAgent

if TYPE_CHECKING:
    from agl_slime.runner.processes import StoreAccess

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
    spec: WorkerSpec
    handle: Any
    running: Any


class RayPool:
    """``actors`` runners on Ray.

    Args:
        access: the store; workers on other hosts must reach its address, so a Ray of several nodes needs another host
            than the loopback.
        num_cpus: CPUs that Ray reserves for each.
    """

    def __init__(
        self,
        *,
        agent: LitAgent[Any],
        access: StoreAccess,
        actors: int,
        settings: RunnerSettings | None = None,
        num_cpus: float = 1.0,
    ) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError as error:
            raise MissingDependencyError(
                'runners on Ray need Ray: pip install "ray>=2.40", or use --runners process:N'
            ) from error
        self._agent = agent
        self._access = access
        self._count = actors
        self._settings = settings or RunnerSettings()
        self._num_cpus = num_cpus
        self._restarts_left = self._settings.restarts(actors)
        self._actors: dict[str, _Actor] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._watcher: threading.Thread | None = None
        self._own_ray = False

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def start(self) -> RayPool:
        if self._watcher is not None:
            raise LoopError("The pool was started already; make a new one to run again.")
        from agl_slime.runner.processes import worker_names

        ray = self._ray
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
            self._own_ray = True
        try:
            self._check_address()
            self._access.open()
            for name in worker_names(self._count, kind="ray"):
                spec = WorkerSpec(
                    agent=self._agent,
                    store_url=self._access.url,
                    store_token=self._access.token,
                    settings=self._settings,
                    name=name,
                )
                self._launch(spec)
            ready, _ = ray.wait(
                [actor.handle.ready.remote() for actor in self._actors.values()],
                num_returns=1,
                timeout=_START_TIMEOUT_S,
            )
            if not ready:
                raise LoopError(
                    f"no runner actor was ready within {_START_TIMEOUT_S:g} s; Ray has {ray.available_resources().get('CPU', 0):g} free CPUs"
                )
            try:
                ray.get(ready)
            except ray.exceptions.RayError as error:
                raise LoopError(f"the runner actors could not start: {error}") from error
            self._watcher = threading.Thread(target=self._watch, name="agl-slime-ray-pool", daemon=True)
            self._watcher.start()
        except BaseException:
            self.stop(timeout_s=0.0)
            raise
        return self

    def wake(self) -> None:
        with self._lock:
            for actor in self._actors.values():
                actor.handle.wake.remote()

    def stop(self, *, cancel: bool = True, timeout_s: float = 10.0) -> bool:
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None
        with self._lock:
            actors, self._actors = list(self._actors.values()), {}
        ray = self._ray
        for actor in actors:
            actor.handle.stop.remote(cancel)
        unfinished: list[Any] = []
        if actors:
            _, unfinished = ray.wait(
                [actor.running for actor in actors], num_returns=len(actors), timeout=max(timeout_s, 0.001)
            )
        for actor in actors:
            ray.kill(actor.handle)
            self._access.fail_worker(actor.spec.name, "the pool was stopped")
        self._access.close()
        if self._own_ray:
            self._own_ray = False
            ray.shutdown()
        if unfinished:
            logger.warning(
                "%d of %d runner actors did not stop within %g s and were ended.",
                len(unfinished),
                len(actors),
                timeout_s,
            )
        return not unfinished

    def __enter__(self) -> RayPool:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _check_address(self) -> None:
        nodes = sum(bool(node.get("Alive")) for node in self._ray.nodes())
        if nodes > 1 and _is_loopback(self._access.host):
            raise ConfigError(
                f"Ray has {nodes} nodes, and the store would be served on {self._access.host}, which only this one reaches; "
                "give --store-host an address of this machine"
            )

    def _launch(self, spec: WorkerSpec) -> None:
        actor_class = self._ray.remote(num_cpus=self._num_cpus, max_restarts=0)(RunnerActor)
        handle = actor_class.remote(spec)
        with self._lock:
            self._actors[spec.name] = _Actor(spec, handle, handle.run.remote())

    def _watch(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                actors = list(self._actors.values())
            if not actors:
                return
            # in short looks: ray.wait cannot be woken
            ended, _ = self._ray.wait([actor.running for actor in actors], num_returns=1, timeout=_LOOK_S)
            for actor in actors:
                if actor.running in ended and not self._stopping.is_set():
                    self._bury(actor)

    def _bury(self, actor: _Actor) -> None:
        from agl_slime.runner.processes import worker_names

        try:
            self._ray.get(actor.running)
            reason = "it returned"
        except self._ray.exceptions.RayError as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        with self._lock:
            self._actors.pop(actor.spec.name, None)
        self._access.fail_worker(actor.spec.name, reason)
        logger.warning("Runner %s has ended (%s).", actor.spec.name, reason)
        if self._restarts_left > 0:
            self._restarts_left -= 1
            if self._stopping.wait(_LOOK_S):
                return
            [name] = worker_names(1, kind="ray")
            self._launch(replace(actor.spec, name=name))
        elif not self._actors:
            self._failure = LoopError(f"all runner actors have ended, the last one with {reason}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


__all__ = ["RayPool", "RunnerActor"]
