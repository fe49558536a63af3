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
from agl_slime.support.child import Supervisor
from agl_slime.support.net import bypass_proxies, public_host
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
    """One ``ConcurrentRunner`` with a store over HTTP, in a dedicated process. ``reason_fd``: the file descriptor that
    gets the reason if the process watch kills it, or -1."""

    def __init__(self, spec: WorkerSpec, reason_fd: int = -1) -> None:
        configure_worker_process()
        self._spec = spec
        self.runner = ConcurrentRunner(settings=spec.settings, name=spec.name, reason_fd=reason_fd)

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
    """Base of the pools: the workers of a plan. A thread per worker waits for its end and starts the next one.

    Args:
        agent: pickled for the workers; they must be able to import its class.
        store: a ``BridgeStore``, served on the plan's ``store_host`` with a random token, or a client of a served one.
    """

    def __init__(self, *, plan: RunnerPlan, agent: LitAgent[Any], store: LightningStore) -> None:
        self._agent = agent
        self._store = store
        self._serving = ExitStack()
        self._plan = plan
        self._settings = plan.settings or RunnerSettings()
        restarts = self._settings.max_restarts
        self._supervisor: Supervisor[Any] = Supervisor(
            launch=self._new_worker,
            follow=self._follow,
            on_lost=self._lost,
            kill=self._kill,
            restarts=3 * plan.count if restarts is None else restarts,
        )
        self._started = False
        self._launching = threading.Lock()

    @property
    def failure(self) -> BaseException | None:
        return self._supervisor.failure

    # -- for the kinds of pools ---------------------------------------------------------------------------------------

    @abstractmethod
    def _launch(self, spec: WorkerSpec) -> Any:
        """Start a worker. Called for one worker at a time."""

    @abstractmethod
    def _wait_for_end(self, worker: Any) -> tuple[str, str]:
        """Tell the supervisor when the worker executes rollouts, wait for its end and return the reason, and the id of
        the rollout that caused it or ""; fail the supervisor if a replacement would end in the same way."""

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
            self._supervisor.start(self._plan.count)
            self._wait_for_first()
        except BaseException:
            self.stop(timeout_s=0.0)
            raise
        return self

    def wake(self) -> None:
        self._send_all("wake")

    def stop(self, *, cancel: bool = True, timeout_s: float = 10.0) -> bool:
        self._supervisor.stop()
        self._send_all("stop" if cancel else "drain")
        if late := self._supervisor.unended_after(timeout_s):
            logger.warning("%d of %d runners (%s) did not end in time.", len(late), self._plan.count, self._plan.kind)
            self._send_all("stop")
            for worker in self._supervisor.unended_after(_CANCEL_TIMEOUT_S):
                self._kill(worker)
            self._supervisor.unended_after(_KILL_TIMEOUT_S)
        self._close()
        return not late

    def _send_all(self, command: Command) -> None:
        for worker in self._supervisor.unended_after(0.0):
            self._send(worker, command)

    def _open(self) -> None:
        bypass_proxies(public_host(self._plan.store_host))  # workers inherit it
        self._store_url, self._store_token = self._serving.enter_context(served(self._store, self._plan.store_host))

    def _close(self) -> None:
        self._serving.close()

    def _wait_for_first(self) -> None:
        if not self._supervisor.wait_ready(_START_TIMEOUT_S):
            raise LoopError(f"No runner ({self._plan.kind}) was ready within {_START_TIMEOUT_S:g} s{self._shortage()}.")
        if self._supervisor.stopping:
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
            return name, self._launch(spec)

    def _follow(self, name: str, worker: Any) -> str:
        """Wait for a worker's end and fail its rollouts, which others retry; a store elsewhere misses heartbeats."""
        reason, cause = self._wait_for_end(worker)
        if cause:  # whose retries are limited already
            self._supervisor.restore_restarts()
        stopping = self._supervisor.stopping
        if isinstance(self._store, BridgeStore):
            why = "the pool was stopped" if stopping else reason
            run_blocking(self._store.fail_worker(name, reason=why, gone=True, cause=cause))
        if not stopping:
            logger.warning("A runner (%s) has ended: %s.", self._plan.kind, reason)
        return reason

    def _lost(self, reason: str) -> None:
        if not self._supervisor.stopping and not self._supervisor.supervised:
            error = LoopError(f"all runners ({self._plan.kind}) have ended, the last one with {reason}")
            self._supervisor.fail(error)
