"""A runner in a process of its own: what ``ProcessPool`` starts and Ray actors run."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from agl_slime.runner.concurrent import ConcurrentRunner, RunnerSettings
from agl_slime.runner.garbage import tune_garbage_collector
from agl_slime.store.client import WorkerStore
from agl_slime.support.agl import LitAgent

logger = logging.getLogger(__name__)

# What the pool says to a worker, one word at a time. The end of the pipe means that the pool is gone.
Command = Literal["wake", "stop", "drain"]
READY = "ready"

# A worker whose pool is gone gives its agents this long to be cancelled, and then ends whatever they do.
_ORPHAN_GRACE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker needs to know; travels to it by pickle. ``name`` is how the store knows it."""

    agent: LitAgent[Any]
    store_url: str
    store_token: str | None
    settings: RunnerSettings
    name: str


class Worker:
    """One ``ConcurrentRunner`` against a store over HTTP."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._store = WorkerStore(spec.store_url, token=spec.store_token)
        self.runner = ConcurrentRunner(settings=spec.settings, name=spec.name)

    async def run(self) -> None:
        """Execute rollouts until the runner is stopped."""
        runner, agent = self.runner, self._spec.agent
        runner.init(agent)
        runner.init_worker(0, self._store)
        try:
            await runner.iter()
        finally:
            close = getattr(agent, "aclose", None)
            if close is not None:
                await close()
            runner.teardown_worker(0)
            runner.teardown()
            await self._store.close()


def process_main(spec: WorkerSpec, control: Connection) -> None:
    """The main function of a worker process."""
    # Ctrl-C reaches every process of the terminal; the pool decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s {spec.name}: %(message)s")
    logging.getLogger("agentlightning").setLevel(logging.CRITICAL)  # failures are in the store, with their reasons
    tune_garbage_collector()
    worker = Worker(spec)
    signal.signal(signal.SIGTERM, lambda *_: worker.runner.stop())
    threading.Thread(target=_obey, args=(worker.runner, control), name="agl-slime-control", daemon=True).start()
    try:
        control.send(READY)
        asyncio.run(worker.run())
    finally:
        control.close()


def _obey(runner: ConcurrentRunner, control: Connection) -> None:
    while True:
        try:
            command: Command = control.recv()
        except (EOFError, OSError):
            if not runner.stopping:
                logger.warning("The process that started this runner is gone; the runner ends.")
                runner.stop()
                time.sleep(_ORPHAN_GRACE_S)
                os._exit(1)
            return
        if command == "wake":
            runner.wake()
        else:
            runner.stop(cancel=command == "stop")


__all__ = ["READY", "Command", "Worker", "WorkerSpec", "process_main"]
