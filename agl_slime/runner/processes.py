"""Several runners at once, behind one interface: a thread, processes of this machine, or Ray actors.

All are the same ``ConcurrentRunner``. Workers outside of this process claim their work from the store over HTTP like
any other runner; nothing is scheduled here. A worker that dies is noticed, its rollouts are handed to others at once,
and it is replaced while there are replacements left.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from agl_slime.errors import ConfigError, LoopError
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.concurrent import FinishedListener, RunnerSettings
from agl_slime.runner.thread import RunnerThread
from agl_slime.runner.worker import READY, Command, WorkerSpec, process_main
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.server import StoreService
from agl_slime.support.agl import LightningStore, LightningStoreClient, LitAgent

logger = logging.getLogger(__name__)

# Each import of Agent Lightning takes five seconds of a core, and they start together.
_START_TIMEOUT_S = 120.0
# After the time to stop, a worker that is terminated has this long before it is killed.
_TERMINATE_S = 2.0


class RunnerPool(Protocol):
    """Runners that execute the rollouts of one store."""

    def start(self) -> Any:
        """Start; returns when rollouts can be executed. Raises ``LoopError`` or ``ConfigError``. Blocks, for seconds
        where processes start."""
        ...

    def wake(self) -> None:
        """Look at the queue now."""
        ...

    @property
    def failure(self) -> BaseException | None:
        """Why no rollouts are executed any more, when ``stop`` is not the reason."""
        ...

    def stop(self, *, cancel: bool = True, timeout_s: float = 10.0) -> bool:
        """End all runners, with what is in flight cancelled or finished; nothing is left running. ``False`` when force
        was needed."""
        ...


def make_runners(
    plan: RunnerPlan | str,
    *,
    agent: LitAgent[Any],
    store: LightningStore,
    settings: RunnerSettings | None = None,
    on_finished: FinishedListener | None = None,
    store_host: str = "127.0.0.1",
) -> RunnerPool:
    """The runners of a plan (``inproc``, ``process:N``, ``ray:N``), not started yet.

    Args:
        store: a ``BridgeStore``, which is then served over HTTP to workers outside of this process; or a client of one
            that is served elsewhere.
        on_finished: told about each rollout that a thread of this process has executed; workers elsewhere tell the
            store.
        store_host: the address on which the store is served; workers on other hosts must reach it.
    """
    plan = RunnerPlan.parse(plan) if isinstance(plan, str) else plan
    if plan.kind == "inproc":
        return RunnerThread(agent=agent, store=store, settings=settings, on_finished=on_finished)
    access = StoreAccess(store, host=store_host)
    if plan.kind == "process":
        return ProcessPool(agent=agent, access=access, processes=plan.count, settings=settings)
    from agl_slime.runner.ray_pool import RayPool

    return RayPool(agent=agent, access=access, actors=plan.count, settings=settings)


class StoreAccess:
    """How workers outside of this process reach a store: served from here, with a random token, or where it is served
    already."""

    def __init__(self, store: LightningStore, *, host: str = "127.0.0.1") -> None:
        if not isinstance(store, (BridgeStore, LightningStoreClient)):
            raise ConfigError(
                f"runners in other processes need a BridgeStore, or a client of a store that is served, got a {type(store).__name__}"
            )
        self._store = store
        self._host = host
        self._service: StoreService | None = None
        self.token: str | None = getattr(store, "_token", None)

    @property
    def url(self) -> str:
        if self._service is not None:
            return self._service.url
        assert isinstance(self._store, LightningStoreClient)
        return self._store.server_address_root

    @property
    def host(self) -> str:
        return self._host

    def open(self) -> None:
        if isinstance(self._store, BridgeStore) and self._service is None:
            self.token = os.environ.get("AGL_SLIME_STORE_TOKEN") or secrets.token_urlsafe(24)
            service = StoreService(store=self._store, host=self._host, token=self.token)
            _outside_of_any_loop(service.start)
            self._service = service

    def close(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            _outside_of_any_loop(service.stop)

    def fail_worker(self, name: str, reason: str) -> None:
        """Hand the rollouts of a dead worker to others. A store elsewhere notices by itself, when the worker's
        heartbeats stop."""
        if isinstance(self._store, BridgeStore):
            store = self._store
            _outside_of_any_loop(lambda: asyncio.run(store.fail_worker(name, reason=reason, gone=True)))


def worker_names(count: int, *, kind: str) -> list[str]:
    """Names that no other runner of the same store has."""
    return [f"{kind}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}-{number}" for number in range(count)]


@dataclass(slots=True)
class _WorkerProcess:
    spec: WorkerSpec
    process: BaseProcess
    control: Connection
    ready: bool = False
    silent: bool = False  # it has said all that it will say: that it is ready, or nothing because it ended


class ProcessPool:
    """Worker processes, started fresh (``spawn``): each imports Agent Lightning, 5 s and about 320 MB.

    Args:
        agent: travels to the workers by pickle; its class must be importable there.
        processes: how many.
    """

    def __init__(
        self,
        *,
        agent: LitAgent[Any],
        access: StoreAccess,
        processes: int,
        settings: RunnerSettings | None = None,
    ) -> None:
        self._agent = agent
        self._access = access
        self._settings = settings or RunnerSettings()
        self._count = processes
        self._restarts_left = self._settings.restarts(processes)
        self._context = multiprocessing.get_context("spawn")
        self._workers: dict[str, _WorkerProcess] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._stopping = False
        self._failure: BaseException | None = None
        self._began = False  # whether a worker has ever come up
        self._watcher: threading.Thread | None = None
        self._alarm_out, self._alarm_in = self._context.Pipe(duplex=False)

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that live."""
        with self._lock:
            return [
                worker.process.pid
                for worker in self._workers.values()
                if worker.process.pid is not None and worker.process.is_alive()
            ]

    @property
    def ready_pids(self) -> list[int]:
        """Of those the ones that have come up and execute rollouts."""
        with self._lock:
            return [
                w.process.pid
                for w in self._workers.values()
                if w.ready and w.process.pid is not None and w.process.is_alive()
            ]

    def start(self) -> ProcessPool:
        if self._watcher is not None:
            raise LoopError("The pool was started already; make a new one to run again.")
        self._access.open()
        try:
            for name in worker_names(self._count, kind="process"):
                self._spawn(self._spec(name))
            self._watcher = threading.Thread(target=self._watch, name="agl-slime-pool", daemon=True)
            self._watcher.start()
            self._wait_for_the_first()
        except BaseException:
            self.stop(timeout_s=0.0)
            raise
        return self

    def wake(self) -> None:
        self._say("wake")

    def stop(self, *, cancel: bool = True, timeout_s: float = 10.0) -> bool:
        with self._changed:
            self._stopping = True
            workers = list(self._workers.values())
            self._changed.notify_all()
        for worker in workers:
            if not worker.ready:  # it is importing, hears nothing yet, and has nothing in flight
                worker.process.terminate()
        self._say("stop" if cancel else "drain")
        deadline = time.monotonic() + timeout_s
        for worker in workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
        forced = [worker for worker in workers if worker.process.is_alive()]
        for worker in forced:
            worker.process.terminate()
        terminated = time.monotonic() + _TERMINATE_S
        for worker in forced:
            worker.process.join(max(0.0, terminated - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        if self._watcher is not None:
            self._alarm_in.send(None)
            self._watcher.join()
            self._watcher = None
        for worker in workers:
            self._access.fail_worker(worker.spec.name, "the pool was stopped")
            worker.control.close()
            worker.process.close()
        with self._lock:
            self._workers.clear()
        self._access.close()
        if forced:
            logger.warning(
                "%d of %d runner processes did not stop within %g s and were ended.",
                len(forced),
                len(workers),
                timeout_s,
            )
        return not forced

    def __enter__(self) -> ProcessPool:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _spec(self, name: str) -> WorkerSpec:
        return WorkerSpec(
            agent=self._agent,
            store_url=self._access.url,
            store_token=self._access.token,
            settings=self._settings,
            name=name,
        )

    def _spawn(self, spec: WorkerSpec) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=process_main, args=(spec, theirs), name=spec.name, daemon=True)
        try:
            process.start()
        except Exception as error:
            ours.close()
            if getattr(multiprocessing.current_process(), "_inheriting", False):
                raise ConfigError(
                    "a worker process imports the script that started it, and this script starts workers again while it is imported; put what "
                    "it does under `if __name__ == '__main__':`"
                ) from None
            raise ConfigError(
                f"{type(self._agent).__name__} cannot be sent to another process ({type(error).__name__}: {error}); make it picklable, with its "
                "class in a module of its own, or use --runners inproc"
            ) from error
        finally:
            theirs.close()
        with self._lock:
            late = self._stopping
            if not late:
                self._workers[spec.name] = _WorkerProcess(spec, process, ours)
        if late:  # stopped meanwhile, by another thread, which did not know of this one
            process.kill()
            process.join()
            process.close()
            ours.close()

    def _say(self, command: Command) -> None:
        with self._lock:
            workers = list(self._workers.values())
        for worker in workers:
            try:
                worker.control.send(command)
            except OSError:
                logger.debug("Runner %s has ended and does not hear %r.", worker.spec.name, command)

    def _wait_for_the_first(self) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._stopping
                    or self._failure is not None
                    or any(worker.ready for worker in self._workers.values())
                ),
                _START_TIMEOUT_S,
            )
            if self._stopping:
                raise LoopError("The runners were stopped before they had started.")
            if self._failure is not None:
                raise LoopError(f"The runners could not start: {self._failure}") from self._failure
            if not any(worker.ready for worker in self._workers.values()):
                raise LoopError(f"No runner process was ready within {_START_TIMEOUT_S:g} s.")

    def _watch(self) -> None:
        try:
            self._watch_workers()
        except (
            Exception
        ) as error:  # a replacement that could not be started: whoever waits for rollouts must hear of it
            logger.error("The runner processes are not watched any more: %s", error, exc_info=error)
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _watch_workers(self) -> None:
        """Waits for what the workers say and for their ends."""
        while True:
            with self._lock:
                workers = list(self._workers.values())
            if not workers:
                return
            happened = wait(
                [self._alarm_out, *(w.process.sentinel for w in workers), *(w.control for w in workers if not w.silent)]
            )
            if self._stopping:
                return
            for worker in workers:
                if worker.control in happened:
                    self._hear(worker)
                if worker.process.sentinel in happened:
                    self._bury(worker)

    def _hear(self, worker: _WorkerProcess) -> None:
        worker.silent = True
        try:
            worker.ready = worker.control.recv() == READY
        except (EOFError, OSError):
            return  # it is ending; the sentinel says so
        with self._changed:
            self._began = self._began or worker.ready
            self._changed.notify_all()

    def _bury(self, worker: _WorkerProcess) -> None:
        worker.process.join()
        code = worker.process.exitcode
        reason = _spell_exit(code)
        with self._lock:
            if self._stopping:
                return
            self._workers.pop(worker.spec.name, None)
        worker.control.close()
        worker.process.close()
        self._access.fail_worker(worker.spec.name, reason)
        logger.warning("Runner %s has ended (%s).", worker.spec.name, reason)
        if code and code > 0 and not self._began:
            # not killed: the next one would end in the same way (a module that cannot be imported, a script without a
            # main guard)
            with self._changed:
                self._failure = LoopError(
                    f"a runner process ended before it was ready ({reason}); what it printed says why"
                )
                self._changed.notify_all()
            return
        if self._restarts_left > 0:
            self._restarts_left -= 1
            [name] = worker_names(1, kind="process")
            self._spawn(replace(worker.spec, name=name))
            return
        with self._changed:
            if not self._workers:
                self._failure = LoopError(f"all runner processes have ended, the last one with {reason}")
            self._changed.notify_all()


def _spell_exit(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by signal {-code}"
    return f"exit code {code}"


def _outside_of_any_loop(function: Callable[[], Any]) -> None:
    """Call a function that runs an event loop of its own, also from inside of one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        function()
        return
    failures: list[BaseException] = []

    def call() -> None:
        try:
            function()
        except BaseException as error:  # raised below, where it belongs
            failures.append(error)

    thread = threading.Thread(target=call, name="agl-slime-pool-call")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


__all__ = ["ProcessPool", "RunnerPool", "StoreAccess", "make_runners", "worker_names"]
