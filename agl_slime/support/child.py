"""Child processes: ``Child``, one with a process group of its own; ``ServerChild``, one that answers at an address;
``Supervisor``, which starts ended children again."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Generic, Self, TypeVar

from agl_slime.errors import EngineError, EngineTimeoutError

logger = logging.getLogger(__name__)

C = TypeVar("C")

_TAIL_BYTES = 2000
_GRACE_S = 3.0
_POLL_S = 0.25


class Child:
    """A process, from ``start`` (or the ``with`` block) to ``stop``, which also ends that process's children.

    Its output is appended to ``log``; without a log only its tail is kept. ``name`` is its name in errors; ``options``
    are further arguments of ``subprocess.Popen``.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        name: str,
        env: Mapping[str, str],
        log: Path | None = None,
        **options: Any,
    ) -> None:
        self.name = name
        self._command = [str(part) for part in command]
        self._env = env
        self._log = log
        self._log_from = 0
        self._options = options
        self._process: subprocess.Popen[Any] | None = None
        self._output: IO[bytes] | None = None
        self._lock = threading.Lock()
        self._stopped = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start the process. Raises ``OSError``, and ``EngineError`` for a second start."""
        with self._lock:
            if self._stopped:
                raise EngineError(f"{self.name} was stopped; make a new one")
            if self._process is not None:
                raise EngineError(f"{self.name} is already started")
            self._process = self._spawn()
        return self

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code, or ``None`` if the process has not ended within ``timeout_s``."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self, grace_s: float = _GRACE_S) -> None:
        """End the process, with SIGTERM and after ``grace_s`` with SIGKILL, and then its children. Safe to call twice
        and during ``start`` in another thread: no process is left, and none is started afterwards."""
        with self._lock:
            process = None if self._stopped else self._process
            self._stopped = True
        if process is not None:
            process.terminate()
            try:
                process.wait(grace_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # its children are in its group
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        with self._lock:
            if self._output is not None:
                self._output.close()
                self._output = None

    def output_tail(self) -> str:
        """The last lines of the output, and the path of all of them; "none" after the stop."""
        with self._lock:
            if self._output is None:
                return "none"
            # the child shares the file's position, so it must not be moved
            size = os.fstat(self._output.fileno()).st_size
            tail = os.pread(self._output.fileno(), _TAIL_BYTES, max(self._log_from, size - _TAIL_BYTES))
        log = f" (all of them: {self._log})" if self._log is not None else ""
        return (tail.decode(errors="replace").strip() or "none") + log

    def ending(self) -> str:
        """Its exit and the tail of its output."""
        return f"{describe_exit(self.wait(0.0))}; last output: {self.output_tail()}"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be half gone; the child watches its parent besides
            self.stop()

    def _spawn(self) -> subprocess.Popen[Any]:
        # a file, for the child's life: a pipe without a reader would fill and block it
        self._output = tempfile.TemporaryFile() if self._log is None else self._log.open("a+b")  # noqa: SIM115
        self._log_from = os.fstat(self._output.fileno()).st_size  # the text before belongs to an earlier child
        return spawn(self._command, output=self._output, env=self._env, **self._options)


def describe_exit(code: int | None) -> str:
    """The end of a process by its exit code; as in a shell, 128 + N stands for signal N, too."""
    number = 0 if code is None else -code if code < 0 else code - 128
    often = ", most often for memory" if number == signal.SIGKILL else ""
    return f"killed by signal {number}{often}" if 0 < number < signal.NSIG else f"exit code {code}"


def spawn(
    command: Sequence[str], *, output: IO[bytes], env: Mapping[str, str], **options: Any
) -> subprocess.Popen[Any]:
    """Start a process in a group of its own, by default without standard input and with its output in a file."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
    return subprocess.Popen(command, env=dict(env), start_new_session=True, **(streams | options))


class ServerChild(Child):
    """A child that writes one line to standard output once it answers, ``{"url": "…", "serving": "…"}``, and ends by
    itself when it is no longer this process's child. ``served`` names its model or rollouts in errors."""

    summary = ""
    """The served model in one sentence; empty before the start."""
    _url: str | None = None

    def __init__(
        self, command: Sequence[str | os.PathLike[str]], *, served: str, start_timeout_s: float, **options: Any
    ) -> None:
        super().__init__(command, stdout=subprocess.PIPE, text=True, **options)
        self._served = served
        self._start_timeout_s = start_timeout_s

    @property
    def url(self) -> str:
        """The address that it listens on. Raises ``EngineError`` when it was not started."""
        if self._url is None:
            raise EngineError(f"{self.name} has not been started: call start() or use it as a context manager")
        return self._url

    def start(self) -> Self:
        """Start the process and wait until it answers.

        Raises ``EngineError`` with the child's last output when it ends early, ``EngineTimeoutError`` when it is not
        ready within ``start_timeout_s``.
        """
        super().start()
        try:
            self._url = self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self, grace_s: float = _GRACE_S) -> None:
        self._url = None
        super().stop(grace_s)

    def _wait_ready(self) -> str:
        assert self._process is not None
        stdout = self._process.stdout
        assert stdout is not None
        name = f"{self.name} for {self._served}"
        try:
            poll = select.poll()
            poll.register(stdout, select.POLLIN)
            # the child writes this line at once; an empty one is the end of its output
            line = stdout.readline() if poll.poll(self._start_timeout_s * 1000) else None
        except (ValueError, OSError):  # closed by stop() from another thread
            line = ""
        if line is None:
            within = f"{self._start_timeout_s:g} s"
            raise EngineTimeoutError(f"{name} was not ready within {within}; last output: {self.output_tail()}")
        if not line:
            self.wait()
            raise EngineError(f"{name} has ended: {self.ending()}")
        try:
            ready = json.loads(line)
            self.summary = str(ready["serving"])
            return str(ready["url"])
        except (ValueError, KeyError, TypeError):
            raise EngineError(f"{name} printed {line.strip()!r} where its address was expected") from None


class Supervisor(Generic[C]):
    """Keeps children running: a thread for each waits for its end and starts the next one, while a restart is left.

    Args:
        launch: starts a child; returns its unique name and it.
        follow: waits for a child's end and cleans up; returns the reason, or "" if it is not to be started again.
        on_lost: is called when a child is not started again, with its reason.
        kill: ends a child that was started while ``stop`` was called.
        restarts: the number of restarts of all children together.
        pause_s: the pause before the n-th restart.
    """

    def __init__(
        self,
        *,
        launch: Callable[[], tuple[str, C]],
        follow: Callable[[str, C], str],
        on_lost: Callable[[str], None],
        kill: Callable[[C], None],
        restarts: int,
        pause_s: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        self._launch, self._follow, self._on_lost, self._kill = launch, follow, on_lost, kill
        self._most_restarts, self._pause_s = restarts, pause_s
        self._restarts_left = restarts
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()  # guards what follows
        self.children: dict[str, C] = {}
        """By name, until their ends were processed."""
        self.supervised = 0
        """Number of children that run or are started again."""
        self.restarts = 0
        self.ready = False
        """Whether a child was ever ready."""
        self.stopping = False
        self.failure: BaseException | None = None

    def start(self, count: int = 1) -> None:
        self.supervised = count
        for _ in range(count):
            child = self._new()
            thread = threading.Thread(target=self._keep, args=child, name="agl-slime-supervisor", daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def running(self) -> bool:
        """Whether a child runs, or will be started again."""
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Start no further child. The caller ends the running ones."""
        with self._changed:
            self.stopping = True
            self._changed.notify_all()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until all ends were processed."""
        for thread in self._threads:
            thread.join(timeout_s)

    def unended_after(self, timeout_s: float) -> list[C]:
        """The children that have not ended within ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: not self.children, timeout_s)
            return list(self.children.values())

    def note_ready(self) -> None:
        with self._changed:
            self.ready = True
            self._changed.notify_all()

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether a child was ready, the supervisor was stopped or it failed within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(lambda: self.ready or self.stopping or self.failure is not None, timeout_s)

    def fail(self, error: BaseException) -> None:
        """Start no further child because of this error; a later one changes nothing."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def restore_restarts(self) -> None:
        """Begin the count of restarts again."""
        self._restarts_left = self._most_restarts

    def _new(self) -> tuple[str, C]:
        name, child = self._launch()
        with self._changed:
            self.children[name] = child
            stopped = self.stopping
        if stopped:  # by another thread, which did not see this child
            self._kill(child)
        return name, child

    def _keep(self, name: str, child: C) -> None:
        reason = ""
        try:
            while True:
                try:
                    reason = self._follow(name, child)
                finally:
                    with self._changed:
                        del self.children[name]
                        self._changed.notify_all()
                if not reason or not self._take_restart():
                    break
                name, child = self._new()
        except Exception as error:  # whoever waits for the children's work checks ``failure``
            logger.error("A child process is no longer supervised: %s", error, exc_info=error)
            self.fail(error)
        with self._changed:
            self.supervised -= 1
        self._on_lost(reason)

    def _take_restart(self) -> bool:
        with self._changed:
            if self.stopping or self.failure is not None or self._restarts_left <= 0:
                return False
            self._restarts_left -= 1
            self.restarts += 1
            return not self._changed.wait_for(lambda: self.stopping, self._pause_s(self.restarts))


def wait_beside_parent(
    process: subprocess.Popen[Any], parent_pid: int, on_poll: Callable[[], None] = lambda: None
) -> int | None:
    """The exit code of a process, 128 + N after signal N; ``None`` once this process is no longer the child of
    ``parent_pid``. ``on_poll`` is called four times a second."""
    while process.poll() is None and os.getppid() == parent_pid:
        on_poll()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
    return 128 - code if (code := process.returncode) is not None and code < 0 else code
