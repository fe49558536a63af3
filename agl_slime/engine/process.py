"""The embedded engine as a child process: started, waited for, and surely ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from agl_slime.errors import EngineError, EngineTimeoutError

_STDERR_TAIL = 2000
_STOP_TIMEOUT_S = 3.0


class EmbeddedEngine:
    """Serves ``model_path`` on 127.0.0.1 in a process of its own, from ``start`` (or the ``with`` block) to ``stop``.
    The child ends by itself when this process dies, however it dies.

    ``options`` are the flags of ``python -m agl_slime.engine``: ``random_seed``, ``context_length``, …; the port is a
    free one unless it is given.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        start_timeout_s: float = 300.0,
        env: Mapping[str, str] | None = None,
        **options: int,
    ) -> None:
        self.model_path = Path(model_path)
        self._start_timeout_s = start_timeout_s
        self._options = options
        self._env = dict(env or {})
        self._process: subprocess.Popen[str] | None = None
        self._stderr: IO[bytes] | None = None
        self._url: str | None = None
        self.summary = ""
        """In a sentence what is served and what it takes: model, threads, memory of keys and values. Once started."""
        self._lock = threading.Lock()
        self._stopped = False

    @property
    def url(self) -> str:
        """Where it listens. Raises ``EngineError`` when it was not started."""
        if self._url is None:
            raise EngineError("the embedded engine has not been started: call start() or use it as a context manager")
        return self._url

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> EmbeddedEngine:
        """Start the process and wait until it answers.

        Raises ``EngineError`` with the child's own last words when it ends early, ``EngineTimeoutError`` when it is not
        ready within ``start_timeout_s``.
        """
        with self._lock:
            if self._stopped:
                raise EngineError("the embedded engine was stopped; make a new one")
            if self._process is not None:
                raise EngineError("the embedded engine is already started")
            process = self._process = self._spawn()
        try:
            self._url = self._wait_ready(process)
        except BaseException:
            self.stop()
            raise
        return self

    def _spawn(self) -> subprocess.Popen[str]:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - for the child's life; a pipe nobody reads would fill and block it
        flags = {"model_path": self.model_path, "port": 0, "parent_pid": os.getpid(), **self._options}
        command = [sys.executable, "-m", "agl_slime.engine"]
        command += [part for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        # the engine sets its threads by itself, by the model's size; a library that counts cores shall not add others
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **threads, "HF_HUB_OFFLINE": "1", **self._env},
            text=True,
            start_new_session=True,
        )

    def stop(self) -> None:
        """End the process: SIGTERM, and SIGKILL after 3 s. Doing it twice is fine, also from another thread than the
        one that is in ``start``: no process is left behind, and none is started afterwards."""
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
            if process.stdout is not None:
                process.stdout.close()
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None

    def stderr_tail(self) -> str:
        """The last lines that the process wrote to standard error."""
        stderr = self._stderr
        if stderr is None or stderr.closed:
            return ""
        # the child shares the file's position, so it must not be moved
        size = os.fstat(stderr.fileno()).st_size
        return os.pread(stderr.fileno(), _STDERR_TAIL, max(0, size - _STDERR_TAIL)).decode(errors="replace").strip()

    def __enter__(self) -> EmbeddedEngine:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be half gone; the child watches its parent besides
            self.stop()

    def _wait_ready(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        name = f"the embedded engine for {self.model_path}"
        try:
            poll = select.poll()
            poll.register(process.stdout, select.POLLIN)
            # it writes one line, at once; none means that it has ended
            line = process.stdout.readline() if poll.poll(self._start_timeout_s * 1000) else None
        except (ValueError, OSError):  # closed by stop() from another thread
            line = ""
        if line is None:
            said = self.stderr_tail() or "none"
            raise EngineTimeoutError(f"{name} was not ready within {self._start_timeout_s:g} s; last words: {said}")
        if not line:
            said = self.stderr_tail() or "it said nothing"
            raise EngineError(f"{name} ended with exit code {process.wait()}: {said}")
        try:
            ready = json.loads(line)
            self.summary = str(ready["serving"])
            return str(ready["url"])
        except (ValueError, KeyError, TypeError):
            raise EngineError(f"{name} printed {line.strip()!r} where its address was expected") from None
