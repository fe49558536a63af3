"""``Worker``, a runner in another process, and ``WorkerPool``, the base of the pools of processes and of Ray actors.

Workers claim rollouts from the store over HTTP; the pool schedules nothing. When a worker dies, other workers retry its
rollouts at once, and it is replaced within the restart budget.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from abc import abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, Self

from agl_slime.errors import LoopError
from agl_slime.runner.base import RunnerPlan, RunnerPool, RunnerSettings
from agl_slime.runner.concurrent import ConcurrentRunner
from agl_slime.runner.process import configure_worker_process
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import WorkerStore
from agl_slime.store.server import served
from agl_slime.support.agl import LightningStore, LitAgent
from agl_slime.support.net import bypass_proxies
from agl_slime.support.threads import run_blocking

logger = logging.getLogger(__name__)

Command = Literal["wake", "stop", "drain"]

# All workers import Agent Lightning at the same time, each for five seconds of a core.
_START_TIMEOUT_S = 180.0
# After the stop timeout: time to cancel the remaining rollouts before the worker is killed.
_CANCEL_TIMEOUT_S = 2.0
_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """The arguments of a worker, pickled. ``name`` identifies it in the store."""

    agent: LitAgent[Any]
    store_url: str
    store_token: str | None
    settings: RunnerSettings
    name: str


class Worker:
    """One ``ConcurrentRunner`` with a store over HTTP, in a dedicated process. ``verdict``: the file descriptor that
    gets the reason if the process watch kills it, or -1."""

    def __init__(self, spec: WorkerSpec, verdict: int = -1) -> None:
        configure_worker_process()
        self._spec = spec
        self.runner = ConcurrentRunner(settings=spec.settings, name=spec.name, verdict=verdict)

    def execute(self, command: Command) -> None:
        """Execute a command of the pool. Thread-safe."""
        if command == "wake":
            self.runner.wake()
        else:
            self.runner.stop(cancel=command == "stop")

    async def run(self) -> None:
        """Execute rollouts until the runner is stopped."""
        store = WorkerStore(self._spec.store_url, token=self._spec.store_token)
        try:
            with self.runner.run_context(agent=self._spec.agent, store=store):
                await self.runner.iter()
        finally:
            await store.close()


class WorkerPool(RunnerPool):
    """Base of the pools: the workers of a plan, replaced when they die. A thread per worker waits for its end and
    starts the next one.

    Args:
        agent: pickled for the workers; they must be able to import its class.
        store: a ``BridgeStore``, which is served on the plan's ``store_host`` with a random token, or a client of a
            served one.
    """

    def __init__(self, *, plan: RunnerPlan, agent: LitAgent[Any], store: LightningStore) -> None:
        self._agent = agent
        self._store = store
        self._serving = ExitStack()
        self._plan = plan
        self._places = plan.count
        self._settings = plan.settings or RunnerSettings()
        restarts = self._settings.max_restarts
        self._replacements = 3 * plan.count if restarts is None else restarts
        self._started = False
        self._any_ready = False  # whether a worker was ever ready
        self._stopping = False
        self._workers: dict[str, Any] = {}  # by name, until their end was processed
        self._changed = threading.Condition()  # guards the above
        self._launching = threading.Lock()

    # -- for the kinds of pools ---------------------------------------------------------------------------------------

    @abstractmethod
    def _launch(self, spec: WorkerSpec) -> Any:
        """Start a worker. Called for one worker at a time."""

    @abstractmethod
    def _wait_for_end(self, worker: Any) -> str:
        """Call ``_note_ready`` when the worker executes rollouts, wait for its end and return the reason; call
        ``_fail`` if a replacement would end in the same way."""

    @abstractmethod
    def _send(self, worker: Any, command: Command) -> None:
        """Send a command without waiting. Does nothing if the worker has ended."""

    @abstractmethod
    def _kill(self, worker: Any) -> None:
        """End a worker that did not end by a command."""

    def _shortage(self) -> str:
        """A possible reason why no worker starts, to end a sentence with."""
        return ""

    # -- the pool -----------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        if self._started:
            raise LoopError("The pool was started already; make a new one to run again.")
        self._started = True
        try:
            self._open()
            for _ in range(self._plan.count):
                worker = self._new_worker()
                threading.Thread(target=self._supervise, args=worker, name="agl-slime-pool", daemon=True).start()
            self._wait_for_first()
        except BaseException:
            self.stop(timeout_s=0.0)
            raise
        return self

    def wake(self) -> None:
        self._send_all("wake")

    def stop(self, *, cancel: bool = True, timeout_s: float = 10.0) -> bool:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._send_all("stop" if cancel else "drain")
        if late := self._left_after(timeout_s):
            logger.warning("%d of %d runners (%s) did not end in time.", len(late), self._plan.count, self._plan.kind)
            self._send_all("stop")
            for worker in self._left_after(_CANCEL_TIMEOUT_S):
                self._kill(worker)
            self._left_after(_KILL_TIMEOUT_S)
        self._close()
        return not late

    def _send_all(self, command: Command) -> None:
        for worker in self._left_after(0.0):
            self._send(worker, command)

    def _left_after(self, timeout_s: float) -> list[Any]:
        """The workers that have not ended within ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._workers, timeout_s)
            return list(self._workers.values())

    def _open(self) -> None:
        bypass_proxies(self._plan.store_host)  # workers inherit it
        self._store_url, self._store_token = self._serving.enter_context(served(self._store, self._plan.store_host))

    def _close(self) -> None:
        self._serving.close()

    def _wait_for_first(self) -> None:
        def decided() -> bool:
            return self._any_ready or self._stopping or self.failure is not None

        with self._changed:
            if not self._changed.wait_for(decided, _START_TIMEOUT_S):
                raise LoopError(
                    f"No runner ({self._plan.kind}) was ready within {_START_TIMEOUT_S:g} s{self._shortage()}."
                )
        if self._stopping:
            raise LoopError("The runners were stopped before they had started.")
        if self.failure is not None:
            raise LoopError(f"The runners could not start: {self.failure}") from self.failure

    def _new_worker(self) -> tuple[str, Any]:
        # never used before in this store: requests of a dead worker may still be in flight
        name = f"{self._plan.kind}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        spec = WorkerSpec(
            agent=self._agent,
            store_url=self._store_url,
            store_token=self._store_token,
            settings=self._settings,
            name=name,
        )
        with self._launching:
            worker = self._launch(spec)
        with self._changed:
            self._workers[name] = worker
            stopped = self._stopping
        if stopped:  # by another thread, which did not see this worker
            self._kill(worker)
        return name, worker

    def _supervise(self, name: str, worker: Any) -> None:
        """Wait for the end of a worker and replace it, until no replacement is left."""
        try:
            while True:
                reason = self._wait_for_end(worker)
                try:
                    self._fail_rollouts(name, "the pool was stopped" if self._stopping else reason)
                finally:
                    with self._changed:
                        del self._workers[name]
                        self._changed.notify_all()
                if self._stopping or not self._may_replace(reason):
                    return
                name, worker = self._new_worker()
        except Exception as error:  # callers that wait for rollouts check ``failure``
            logger.error("The runners are no longer supervised: %s", error, exc_info=error)
            self._fail(error)

    def _may_replace(self, reason: str) -> bool:
        logger.warning("A runner (%s) has ended: %s.", self._plan.kind, reason)
        with self._changed:
            if self.failure is None and self._replacements > 0:
                self._replacements -= 1
                return True
            self._places -= 1
            if not self._places:
                self._fail(LoopError(f"all runners ({self._plan.kind}) have ended, the last one with {reason}"))
        return False

    def _note_ready(self) -> None:
        with self._changed:
            self._any_ready = True
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def _fail_rollouts(self, name: str, reason: str) -> None:
        """Fail a dead worker's rollouts, so that others retry them. A store in another process notices the missing
        heartbeats instead."""
        if isinstance(self._store, BridgeStore):
            run_blocking(self._store.fail_worker(name, reason=reason, gone=True))
