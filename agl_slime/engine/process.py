"""An engine as a child process: started, waited for, and surely ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Self

from agl_slime.errors import EngineError, EngineTimeoutError
from agl_slime.support.threads import usable_cores

_STDERR_TAIL = 2000
_STOP_TIMEOUT_S = 3.0


class ChildProcess:
    """An engine on 127.0.0.1 in a process of its own, from ``start`` (or the ``with`` block) to ``stop``, which
    also ends that process's children.

    ``command`` writes one line to standard output once it answers, ``{"url": "…", "serving": "…"}``, and ends by itself
    when it is no longer this process's child. Its standard error is appended to ``log``; without a log only
    its tail is kept. ``name`` is the engine's name in errors.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        name: str,
        model_path: str | os.PathLike[str],
        start_timeout_s: float,
        env: Mapping[str, str],
        log: Path | None = None,
    ) -> None:
        self.name = name
        self.model_path = Path(model_path)
        self._command = [str(part) for part in command]
        self._start_timeout_s = start_timeout_s
        self._env = env
        self._log = log
        self._log_from = 0
        self._process: subprocess.Popen[str] | None = None
        self._stderr: IO[bytes] | None = None
        self._url: str | None = None
        self.summary = ""
        """One sentence on model, threads and memory of the KV cache; empty before the start."""
        self._lock = threading.Lock()
        self._stopped = False

    @property
    def url(self) -> str:
        """The address that it listens on. Raises ``EngineError`` when it was not started."""
        if self._url is None:
            raise EngineError(f"{self.name} has not been started: call start() or use it as a context manager")
        return self._url

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        """Start the process and wait until it answers.

        Raises ``EngineError`` with the child's last output when it ends early, ``EngineTimeoutError`` when it is not
        ready within ``start_timeout_s``.
        """
        with self._lock:
            if self._stopped:
                raise EngineError(f"{self.name} was stopped; make a new one")
            if self._process is not None:
                raise EngineError(f"{self.name} is already started")
            process = self._process = self._spawn()
        try:
            self._url = self._wait_ready(process)
        except BaseException:
            self.stop()
            raise
        return self

    def _spawn(self) -> subprocess.Popen[str]:
        # a file, for the child's life: a pipe without a reader would fill and block it
        self._stderr = tempfile.TemporaryFile() if self._log is None else self._log.open("a+b")  # noqa: SIM115
        self._log_from = os.fstat(self._stderr.fileno()).st_size  # the text before belongs to an earlier child
        return _popen(self._command, stderr=self._stderr, env=self._env)

    def stop(self) -> None:
        """End the process, with SIGTERM and after 3 s with SIGKILL, and then its children. Safe to call twice and
        during ``start`` in another thread: no process is left, and none is started afterwards."""
        with self._lock:
            self._stopped = True
            process, self._process, self._url = self._process, None, None
        if process is not None:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children are in its group
            if process.stdout is not None:
                process.stdout.close()
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    def last_words(self) -> str:
        """The last lines that the process wrote to standard error, and where all of them are."""
        stderr = self._stderr
        if stderr is None or stderr.closed:
            return "none"
        # the child shares the file's position, so it must not be moved
        size = os.fstat(stderr.fileno()).st_size
        tail = os.pread(stderr.fileno(), _STDERR_TAIL, max(self._log_from, size - _STDERR_TAIL))
        where = f" (all of them: {self._log})" if self._log is not None else ""
        return (tail.decode(errors="replace").strip() or "none") + where

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be half gone; the child watches its parent besides
            self.stop()

    def _wait_ready(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        name = f"{self.name} for {self.model_path}"
        try:
            poll = select.poll()
            poll.register(process.stdout, select.POLLIN)
            # it writes one line, at once; none means that it has ended
            line = process.stdout.readline() if poll.poll(self._start_timeout_s * 1000) else None
        except (ValueError, OSError):  # closed by stop() from another thread
            line = ""
        if line is None:
            within = f"{self._start_timeout_s:g} s"
            raise EngineTimeoutError(f"{name} was not ready within {within}; last words: {self.last_words()}")
        if not line:
            raise EngineError(f"{name} ended with exit code {process.wait()}; last words: {self.last_words()}")
        try:
            ready = json.loads(line)
            self.summary = str(ready["serving"])
            return str(ready["url"])
        except (ValueError, KeyError, TypeError):
            raise EngineError(f"{name} printed {line.strip()!r} where its address was expected") from None


def _popen(
    command: Sequence[str], *, stderr: IO[bytes], env: Mapping[str, str], stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=dict(env),
        text=True,
        start_new_session=True,
    )


_ahead: list[tuple[subprocess.Popen[str], IO[bytes]]] = []


@contextlib.contextmanager
def embedded_engine_ahead() -> Iterator[None]:
    """Begin the imports of the block's first ``EmbeddedEngine``, in its process, beside this process's own imports.
    Without an engine that process ends with the block, or with this process."""
    stderr = tempfile.TemporaryFile()  # noqa: SIM115
    ahead = _popen([*_ENGINE, "--wait"], stderr=stderr, env={**os.environ, **_VARIABLES}, stdin=subprocess.PIPE), stderr
    _ahead.append(ahead)
    try:
        yield
    finally:
        if ahead in _ahead:
            _ahead.remove(ahead)
            ahead[0].kill()
            ahead[0].communicate()
            stderr.close()


_ENGINE = [sys.executable, "-m", "agl_slime.engine"]
# the engine sets its threads by itself, by the model's size; a library that counts cores shall not add others
_VARIABLES = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


class EmbeddedEngine(ChildProcess):
    """Serves ``model_path`` with the embedded engine. ``options`` are the flags of ``python -m agl_slime.engine``:
    ``random_seed``, ``context_length``, …; the port is a free one unless it is given."""

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        start_timeout_s: float = 300.0,
        env: Mapping[str, str] | None = None,
        **options: int,
    ) -> None:
        flags = {"model_path": model_path, "port": 0, "parent_pid": os.getpid(), "cores": usable_cores(), **options}
        command = [str(part) for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", value)]
        super().__init__(
            [*_ENGINE, *command],
            name="the embedded engine",
            model_path=model_path,
            start_timeout_s=start_timeout_s,
            env={**os.environ, **_VARIABLES, **(env or {})},
        )
        self._flags = None if env else command

    def _spawn(self) -> subprocess.Popen[str]:
        if self._flags is None or not _ahead:
            return super()._spawn()
        process, self._stderr = _ahead.pop()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # its end is seen where its answer is read
            stdin.write(json.dumps(self._flags) + "\n")
        return process
