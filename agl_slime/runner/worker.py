"""Runners outside of this process: what such a worker runs, and what pools of processes and of Ray actors share.

Workers claim their work from the store over HTTP; nothing is scheduled here. The rollouts of a worker that dies are
tried again by others at once, and it is replaced while there are replacements left.
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

# What a pool says to a worker.
Command = Literal["wake", "stop", "drain"]

# Each import of Agent Lightning takes five seconds of a core, and they start together.
_START_TIMEOUT_S = 180.0
# After the time to stop, a worker has this long to cancel what it should have finished, before it is killed.
_TO_CANCEL_S = 2.0
# A killed worker is gone within moments, unless the system holds it.
_TO_DIE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker needs to know; travels to it by pickle. ``name`` is how the store knows it."""

    agent: LitAgent[Any]
    store_url: str
    store_token: str | None
    settings: RunnerSettings
    name: str


class Worker:
    """One ``ConcurrentRunner`` against a store over HTTP, in a process that is all its own. ``verdict``: descriptor of
    a connection that gets the reason when the watch over the process kills it."""

    def __init__(self, spec: WorkerSpec, verdict: int = -1) -> None:
        configure_worker_process()
        self._spec = spec
        self.runner = ConcurrentRunner(settings=spec.settings, name=spec.name, verdict=verdict)

    def obey(self, command: Command) -> None:
        """On any thread."""
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
    """The workers of a plan, replaced when they die; base of the pools. Each has a thread here that waits for its end
    and starts the next one.

    Args:
        agent: travels to the workers by pickle; its class must be importable there.
        store: a ``BridgeStore``, then served on the plan's ``store_host`` with a random token, or a client of one that
            is served already.
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
        self._came_up = False  # whether a worker ever has
        self._stopping = False
        self._workers: dict[str, Any] = {}  # by name; those whose end is not dealt with yet
        self._changed = threading.Condition()  # guards the above
        self._launching = threading.Lock()

    # -- what a kind of worker is -------------------------------------------------------------------------------------

    @abstractmethod
    def _launch(self, spec: WorkerSpec) -> Any:
        """Start a worker, one at a time."""

    @abstractmethod
    def _outlive(self, worker: Any) -> str:
        """Call ``_note_up`` when the worker executes rollouts, wait for its end and return its reason; call ``_fail``
        when another one would end in the same way."""

    @abstractmethod
    def _tell(self, worker: Any, command: Command) -> None:
        """Without waiting; a worker that has ended hears nothing."""

    @abstractmethod
    def _kill(self, worker: Any) -> None:
        """End a worker that did not end when it was told to."""

    def _shortage(self) -> str:
        """What may keep workers from coming up, for the end of a sentence."""
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
                threading.Thread(target=self._attend, args=worker, name="agl-slime-pool", daemon=True).start()
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
            self._changed.notify_all()
        self._say("stop" if cancel else "drain")
        if forced := self._left_after(timeout_s):
            logger.warning("%d of %d runners (%s) have to be ended.", len(forced), self._plan.count, self._plan.kind)
            self._say("stop")
            for worker in self._left_after(_TO_CANCEL_S):
                self._kill(worker)
            self._left_after(_TO_DIE_S)
        self._close()
        return not forced

    def _say(self, command: Command) -> None:
        for worker in self._left_after(0.0):
            self._tell(worker, command)

    def _left_after(self, timeout_s: float) -> list[Any]:
        """The workers that have not ended within that time."""
        with self._changed:
            self._changed.wait_for(lambda: not self._workers, timeout_s)
            return list(self._workers.values())

    def _open(self) -> None:
        bypass_proxies(self._plan.store_host)  # workers inherit it
        self._store_url, self._store_token = self._serving.enter_context(served(self._store, self._plan.store_host))

    def _close(self) -> None:
        self._serving.close()

    def _wait_for_the_first(self) -> None:
        def decided() -> bool:
            return self._came_up or self._stopping or self.failure is not None

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
        # a name that no other runner of the store has, nor had: what the dead one has sent may still be under way
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
            late = self._stopping
        if late:  # stopped meanwhile, by another thread, which did not know of this one
            self._kill(worker)
        return name, worker

    def _attend(self, name: str, worker: Any) -> None:
        """A worker and those that replace it, one after the other."""
        try:
            while True:
                reason = self._outlive(worker)
                try:
                    self._bury(name, "the pool was stopped" if self._stopping else reason)
                finally:
                    with self._changed:
                        del self._workers[name]
                        self._changed.notify_all()
                if self._stopping or not self._may_replace(reason):
                    return
                name, worker = self._new_worker()
        except Exception as error:  # a replacement that could not be started: who waits for rollouts must hear of it
            logger.error("The runners are not watched any more: %s", error, exc_info=error)
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

    def _note_up(self) -> None:
        with self._changed:
            self._came_up = True
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def _bury(self, name: str, reason: str) -> None:
        """Have others try the rollouts of a dead worker. A store elsewhere notices by itself, when its heartbeats
        stop."""
        if isinstance(self._store, BridgeStore):
            run_blocking(self._store.fail_worker(name, reason=reason, gone=True))
