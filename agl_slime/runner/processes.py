"""Runner processes of this machine."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

from agl_slime.errors import ConfigError, LoopError
from agl_slime.runner.concurrent import ConcurrentRunner
from agl_slime.runner.worker import Worker, WorkerPool, WorkerSpec

logger = logging.getLogger(__name__)

# What the pool says to a worker, one word at a time. The end of the pipe means that the pool is gone.
Command = Literal["wake", "stop", "drain"]
READY = "ready"

# Each import of Agent Lightning takes five seconds of a core, and they start together.
_START_TIMEOUT_S = 120.0
# After the time to stop, a worker that is terminated has this long before it is killed.
_TERMINATE_S = 2.0
# A worker whose pool is gone gives its agents this long to be cancelled, and then ends whatever they do.
_ORPHAN_GRACE_S = 10.0


# -- in the worker ---------------------------------------------------------------------------------------------------


def process_main(spec: WorkerSpec, control: Connection) -> None:
    """The main function of a worker process."""
    # Ctrl-C reaches every process of the terminal; the pool decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s {spec.name}: %(message)s")
    logging.getLogger("agentlightning").setLevel(logging.CRITICAL)  # failures are in the store, with their reasons
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


# -- in the process that starts them ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Process:
    name: str
    process: BaseProcess
    control: Connection
    ready: bool = False
    silent: bool = False  # it has said all that it will say: that it is ready, or nothing because it ended


class ProcessPool(WorkerPool):
    """Worker processes, started fresh (``spawn``): each imports Agent Lightning, 5 s and about 320 MB."""

    kind = "process"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._context = multiprocessing.get_context("spawn")
        self._workers: dict[str, _Process] = {}
        self._began = False  # whether a worker has ever come up
        self._alarm_out, self._alarm_in = self._context.Pipe(duplex=False)

    def pids(self, *, ready: bool = False) -> list[int]:
        """Process ids of the workers that live; ``ready``: only those that execute rollouts."""
        with self._changed:
            alive = [w for w in self._workers.values() if w.process.is_alive() and (w.ready or not ready)]
        return [worker.process.pid for worker in alive if worker.process.pid is not None]

    def wake(self) -> None:
        self._say("wake")

    def stop(self, *, cancel: bool = True, timeout_s: float = 10.0) -> bool:
        self._stopping.set()
        with self._changed:
            workers = list(self._workers.values())
            self._changed.notify_all()
        for worker in workers:
            if not worker.ready:  # it is importing, hears nothing yet, and has nothing in flight
                worker.process.terminate()
        self._say("stop" if cancel else "drain")
        _join(workers, timeout_s)
        forced = [worker for worker in workers if worker.process.is_alive()]
        for worker in forced:
            worker.process.terminate()
        _join(forced, _TERMINATE_S)
        for worker in forced:
            worker.process.kill()
            worker.process.join()
        if self._watcher is not None:
            self._alarm_in.send(None)
            self._watcher.join()
            self._watcher = None
        for worker in workers:
            self._bury(worker.name, "the pool was stopped")
            worker.control.close()
            worker.process.close()
        with self._changed:
            self._workers.clear()
        self._close()
        if forced:
            logger.warning("%d of %d runner processes had to be ended.", len(forced), len(workers))
        return not forced

    def _launch(self, spec: WorkerSpec) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=process_main, args=(spec, theirs), name=spec.name, daemon=True)
        try:
            process.start()
        except Exception as error:
            ours.close()
            if getattr(multiprocessing.current_process(), "_inheriting", False):
                fix = "put what it does under `if __name__ == '__main__':`"
                raise ConfigError(
                    f"a worker imports the script that started it, and it starts workers: {fix}"
                ) from None
            agent, fix = type(self._agent).__name__, "make it picklable, in a module, or use --runners inproc"
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{agent} cannot be sent to another process ({why}); {fix}") from error
        finally:
            theirs.close()
        with self._changed:
            late = self._stopping.is_set()
            if not late:
                self._workers[spec.name] = _Process(spec.name, process, ours)
        if late:  # stopped meanwhile, by another thread, which did not know of this one
            process.kill()
            process.join()
            process.close()
            ours.close()

    def _say(self, command: Command) -> None:
        with self._changed:
            workers = list(self._workers.values())
        for worker in workers:
            try:
                worker.control.send(command)
            except OSError:
                logger.debug("Runner %s has ended and does not hear %r.", worker.name, command)

    def _wait_for_the_first(self) -> None:
        def decided() -> bool:
            return self._began or self._stopping.is_set() or self._failure is not None

        with self._changed:
            if not self._changed.wait_for(decided, _START_TIMEOUT_S):
                raise LoopError(f"No runner process was ready within {_START_TIMEOUT_S:g} s.")
        if self._stopping.is_set():
            raise LoopError("The runners were stopped before they had started.")
        if self._failure is not None:
            raise LoopError(f"The runners could not start: {self._failure}") from self._failure

    def _watch(self) -> None:
        while True:
            with self._changed:
                workers = list(self._workers.values())
            if not workers:
                return
            talking = [worker.control for worker in workers if not worker.silent]
            happened = wait([self._alarm_out, *(worker.process.sentinel for worker in workers), *talking])
            if self._stopping.is_set():
                return
            for worker in workers:
                if worker.control in happened:
                    self._hear(worker)
                if worker.process.sentinel in happened:
                    self._ended(worker)

    def _hear(self, worker: _Process) -> None:
        worker.silent = True
        try:
            worker.ready = worker.control.recv() == READY
        except (EOFError, OSError):
            return  # it is ending; the sentinel says so
        with self._changed:
            self._began = self._began or worker.ready
            self._changed.notify_all()

    def _ended(self, worker: _Process) -> None:
        worker.process.join()
        code = worker.process.exitcode or 0
        reason = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        with self._changed:
            if self._stopping.is_set():
                return
            del self._workers[worker.name]
        worker.control.close()
        worker.process.close()
        self._bury(worker.name, reason)
        if code > 0 and not self._began:
            # not killed: the next one would end in the same way (a module that cannot be imported, a script without a
            # main guard)
            self._fail(LoopError(f"a runner process ended before it was ready ({reason}); what it printed says why"))
        else:
            self._replace(reason, left=len(self._workers))


def _join(workers: list[_Process], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
