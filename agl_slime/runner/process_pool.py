"""Runner processes of this machine."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import multiprocessing
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from agl_slime.errors import ConfigError, LoopError
from agl_slime.runner.worker import Command, Worker, WorkerPool, WorkerSpec
from agl_slime.support.child import describe_exit
from agl_slime.support.terminal import log_to_stderr, print_exception, print_plainly

logger = logging.getLogger(__name__)

READY = "ready"

# A worker without a pool cancels its agents and exits after this time in any case.
_ORPHAN_GRACE_S = 10.0


# -- in the worker ---------------------------------------------------------------------------------------------------


def process_main(spec: WorkerSpec, control: Connection) -> None:
    # the pool handles Ctrl-C, which reaches every process of the terminal
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print_plainly()
    log_to_stderr(logging.WARNING, f"%(levelname)s {spec.name}: %(message)s")
    logging.getLogger("agentlightning").setLevel(logging.CRITICAL)  # failures are in the store, with their reasons
    worker = Worker(spec, reason_fd=control.fileno())
    signal.signal(signal.SIGTERM, lambda *_: worker.runner.stop())
    threading.Thread(target=_receive_commands, args=(worker, control), name="agl-slime-control", daemon=True).start()
    try:
        control.send(READY)
        asyncio.run(worker.run())
    except Exception as error:  # multiprocessing would print the texts of users' exceptions as they are
        print_exception(type(error), error, error.__traceback__)
        sys.exit(1)
    finally:
        control.close()


def _receive_commands(worker: Worker, control: Connection) -> None:
    with suppress(EOFError, OSError):
        while True:
            worker.execute(control.recv())
    if not worker.runner.stopping:
        logger.warning("The process that started this runner has ended; the runner ends.")
        worker.runner.stop()
        faulthandler.dump_traceback_later(_ORPHAN_GRACE_S, exit=True)


# -- in the process that starts them ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Process:
    process: BaseProcess
    control: Connection
    ready: bool = False


class ProcessPool(WorkerPool):
    """Worker processes, started by ``spawn``: each imports Agent Lightning in 5 s and takes about 320 MB."""

    def _launch(self, spec: WorkerSpec) -> _Process:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=process_main, args=(spec, theirs), name=spec.name, daemon=True)
        try:
            process.start()
        except Exception as error:
            ours.close()
            if getattr(multiprocessing.current_process(), "_inheriting", False):
                problem = "the script that starts workers is imported by each of them and starts workers again"
                raise ConfigError(f"{problem}: put its code under `if __name__ == '__main__':`") from None
            agent, fix = type(self._agent).__name__, "make it picklable, in a module, or use --runners inproc"
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{agent} cannot be sent to another process ({why}); {fix}") from error
        finally:
            theirs.close()
        return _Process(process, ours)

    def _wait_for_end(self, worker: _Process) -> tuple[str, str]:
        with suppress(EOFError, OSError):  # it ended before it was ready
            worker.ready = worker.control.recv() == READY
            self._supervisor.note_ready()
        wait([worker.process.sentinel])
        killed_for = cause = ""
        with suppress(EOFError, OSError):  # the killer of a stuck worker sends a reason
            while worker.control.poll():
                killed_for, cause = worker.control.recv()
        with self._launching:  # starting a process also reaps ended ones, and an exit code can be read only once
            worker.process.join()
        code = worker.process.exitcode or 0
        reason = killed_for or describe_exit(code)
        if code > 0 and not self._supervisor.ready:
            # not killed, so its replacement would fail alike (an import that fails, a script without a main guard)
            self._supervisor.fail(LoopError(f"a runner process ended before it was ready ({reason}); see its output"))
        return reason, cause

    def _send(self, worker: _Process, command: Command) -> None:
        if command != "wake" and not worker.ready:
            worker.process.terminate()  # still importing: it reads no commands and has nothing in flight
        with suppress(OSError):
            worker.control.send(command)

    def _kill(self, worker: _Process) -> None:
        worker.process.kill()
