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
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from typing_extensions import Self

from agl_slime.errors import ConfigError, LoopError
from agl_slime.runner.concurrent import ConcurrentRunner, RunnerSettings
from agl_slime.runner.process import own_this_process
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import WorkerStore
from agl_slime.store.server import TOKEN_VARIABLE, StoreService
from agl_slime.support.agl import LightningStore, LightningStoreClient, LitAgent
from agl_slime.support.threads import run_blocking

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker needs to know; travels to it by pickle. ``name`` is how the store knows it."""

    agent: LitAgent[Any]
    store_url: str
    store_token: str | None
    settings: RunnerSettings
    name: str


class Worker:
    """One ``ConcurrentRunner`` against a store over HTTP, in a process that is all its own."""

    def __init__(self, spec: WorkerSpec) -> None:
        own_this_process()
        self._spec = spec
        self.runner = ConcurrentRunner(settings=spec.settings, name=spec.name)

    async def run(self) -> None:
        """Execute rollouts until the runner is stopped."""
        store = WorkerStore(self._spec.store_url, token=self._spec.store_token)
        try:
            with self.runner.run_context(agent=self._spec.agent, store=store):
                await self.runner.iter()
        finally:
            await store.close()


class WorkerPool(ABC):
    """``count`` workers that are replaced when they die; base of the pools, which start, watch and stop them.

    Args:
        agent: travels to the workers by pickle; its class must be importable there.
        store: a ``BridgeStore``, then served on ``store_host`` with a random token, or a client of one that is served
            already.
    """

    kind: str

    def __init__(
        self,
        *,
        agent: LitAgent[Any],
        store: LightningStore,
        count: int,
        settings: RunnerSettings | None = None,
        store_host: str = "127.0.0.1",
    ) -> None:
        if not isinstance(store, (BridgeStore, LightningStoreClient)):
            kind = type(store).__name__
            raise ConfigError(f"runners in other processes need a BridgeStore or a client of one, got a {kind}")
        self._agent = agent
        self._store = store
        self._store_host = store_host
        self._service: StoreService | None = None
        self._count = count
        self._settings = settings or RunnerSettings()
        self._replacements = self._settings.restarts(count)
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._watcher: threading.Thread | None = None

    @property
    def failure(self) -> BaseException | None:
        return self._failure

    def start(self) -> Self:
        if self._watcher is not None:
            raise LoopError("The pool was started already; make a new one to run again.")
        try:
            self._open()
            for _ in range(self._count):
                self._launch(self._new_spec())
            self._watcher = threading.Thread(target=self._watch_until_stopped, name="agl-slime-pool", daemon=True)
            self._watcher.start()
            self._wait_for_the_first()
        except BaseException:
            self.stop(timeout_s=0.0)
            raise
        return self

    @abstractmethod
    def stop(self, *, cancel: bool = True, timeout_s: float = 10.0) -> bool:
        """As ``RunnerPool.stop``."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _open(self) -> None:
        if isinstance(self._store, BridgeStore):
            token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
            self._service = StoreService(store=self._store, host=self._store_host, token=token).start()
            self._store_url, self._store_token = self._service.url, token
        else:
            self._store_url, self._store_token = self._store.server_address_root, getattr(self._store, "_token", None)

    def _close(self) -> None:
        if self._service is not None:
            self._service.stop()

    @abstractmethod
    def _launch(self, spec: WorkerSpec) -> None: ...

    @abstractmethod
    def _wait_for_the_first(self) -> None: ...

    @abstractmethod
    def _watch(self) -> None:
        """Notice what happens to the workers, until there is none or the pool is stopped."""

    def _watch_until_stopped(self) -> None:
        try:
            self._watch()
        except Exception as error:  # a replacement that could not be started: who waits for rollouts must hear of it
            logger.error("The runners are not watched any more: %s", error, exc_info=error)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _new_spec(self) -> WorkerSpec:
        # a name that no other runner of the store has, nor had: what the dead one has sent may still be under way
        return WorkerSpec(
            agent=self._agent,
            store_url=self._store_url,
            store_token=self._store_token,
            settings=self._settings,
            name=f"{self.kind}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}",
        )

    def _replace(self, reason: str, *, left: int) -> None:
        """A worker has ended, and ``left`` others have not."""
        logger.warning("A runner (%s) has ended: %s.", self.kind, reason)
        if self._replacements > 0:
            self._replacements -= 1
            self._launch(self._new_spec())
        elif not left:
            self._fail(LoopError(f"all runners ({self.kind}) have ended, the last one with {reason}"))

    def _bury(self, name: str, reason: str) -> None:
        """Have others try the rollouts of a dead worker. A store elsewhere notices by itself, when its heartbeats
        stop."""
        if isinstance(self._store, BridgeStore):
            run_blocking(self._store.fail_worker(name, reason=reason, gone=True))
