"""Runner processes of this machine."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import multiprocessing
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from agl_slime.errors import ConfigError, LoopError
from agl_slime.runner.worker import Command, Worker, WorkerPool, WorkerSpec

logger = logging.getLogger(__name__)

READY = "ready"

# A worker whose pool is gone gives its agents this long to be cancelled, and then ends whatever they do.
_ORPHAN_GRACE_S = 10.0


# -- in the worker ---------------------------------------------------------------------------------------------------


def process_main(spec: WorkerSpec, control: Connection) -> None:
    """The main function of a worker process."""
    # Ctrl-C reaches every process of the terminal; the pool decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format=f"%(levelname)s {spec.name}: %(message)s")
    logging.getLogger("agentlightning").setLevel(logging.CRITICAL)  # failures are in the store, with their reasons
    worker = Worker(spec, verdict=control.fileno())
    signal.signal(signal.SIGTERM, lambda *_: worker.runner.stop())
    threading.Thread(target=_obey, args=(worker, control), name="agl-slime-control", daemon=True).start()
    try:
        control.send(READY)
        asyncio.run(worker.run())
    finally:
        control.close()


def _obey(worker: Worker, control: Connection) -> None:
    with suppress(EOFError, OSError):
        while True:
            worker.obey(control.recv())
    if not worker.runner.stopping:
        logger.warning("The process that started this runner is gone; the runner ends.")
        worker.runner.stop()
        faulthandler.dump_traceback_later(_ORPHAN_GRACE_S, exit=True)


# -- in the process that starts them ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Process:
    process: BaseProcess
    control: Connection
    ready: bool = False


class ProcessPool(WorkerPool):
    """Worker processes, started fresh (``spawn``): each imports Agent Lightning, 5 s and about 320 MB."""

    def pids(self, *, ready: bool = False) -> list[int]:
        """Process ids of the workers that live; ``ready``: only those that execute rollouts."""
        wanted = [worker.process for worker in self._left_after(0.0) if worker.ready or not ready]
        return [process.pid for process in wanted if not wait([process.sentinel], timeout=0.0)]

    def _launch(self, spec: WorkerSpec) -> _Process:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=process_main, args=(spec, theirs), name=spec.name, daemon=True)
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
        return _Process(process, ours)

    def _outlive(self, worker: _Process) -> str:
        with suppress(EOFError, OSError):  # it ended before it was ready
            worker.ready = worker.control.recv() == READY
            self._note_up()
        wait([worker.process.sentinel])
        verdict = ""
        with suppress(EOFError, OSError):  # the watch over it may have killed it, and has sent the reason
            while worker.control.poll():
                verdict = str(worker.control.recv())
        with self._launching:  # where multiprocessing asks for the exit codes of all, and only one who asks gets it
            worker.process.join()
        code = worker.process.exitcode or 0
        reason = verdict or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")
        if code > 0 and not self._came_up:
            # not killed: the next one would end in the same way (a module that cannot be imported, a script without a
            # main guard)
            self._fail(LoopError(f"a runner process ended before it was ready ({reason}); what it printed says why"))
        return reason

    def _tell(self, worker: _Process, command: Command) -> None:
        if command != "wake" and not worker.ready:
            worker.process.terminate()  # it is importing, hears nothing yet, and has nothing in flight
        with suppress(OSError):
            worker.control.send(command)

    def _kill(self, worker: _Process) -> None:
        worker.process.kill()
