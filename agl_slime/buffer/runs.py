"""Generators: finding their files, and their processes.

A file named ``*_generator.py`` in a directory that a person named has ``TASK_TYPE`` and ``run_rollout``.

A generator runs in a process of its own, which leads a process group. When its standard input ends, the buffer is gone,
and the group ends with it, so that no generator is left behind.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from agl_slime.buffer.pipeline import GroupPipeline
from agl_slime.buffer.settings import PipelineSettings
from agl_slime.rollout.by_file import import_file
from agl_slime.support.http import json_bytes, json_value

logger = logging.getLogger(__name__)

# What of a generator's output is shown when it fails; all of it is in its log file.
_TAIL_BYTES = 4000
_GRACE_S = 3.0
_LONGEST_PAUSE_S = 60.0

INTERRUPTED = "interrupted"

SHIPPED_GENERATORS = Path(__file__).parent / "generators"


@dataclass(frozen=True, slots=True)
class Discovery:
    """What a directory holds: generators by task type, and by file name what is wrong with the others."""

    generators: dict[str, ModuleType] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def file_of(generator: ModuleType) -> Path:
    return Path(str(generator.__file__))


def discover_generators(directory: Path) -> Discovery:
    """Load every ``*_generator.py`` of the directory. Broken files and second files for a task type are reported and
    left out."""
    found = Discovery()
    for path in sorted(directory.glob("*_generator.py")):
        try:
            module = import_file(path, again=True)
            task_type = getattr(module, "TASK_TYPE", None)
            if not isinstance(task_type, str) or not task_type:
                raise TypeError(f"TASK_TYPE is {task_type!r}; expected a name")
            if not callable(getattr(module, "run_rollout", None)):
                raise TypeError("run_rollout(data) is missing")
            GroupPipeline(vars(module), settings=PipelineSettings())  # its stages fit together
        except (Exception, SystemExit) as error:  # a file of somebody else's may do anything while it is loaded
            problem = f"cannot be used: {type(error).__name__}: {error}"
        else:
            if task_type not in found.generators:
                found.generators[task_type] = module
                continue
            problem = f"has the task type {task_type!r} of {file_of(found.generators[task_type]).name} and is left out"
        found.problems[path.name] = problem
        logger.warning("The generator %s %s", path, problem)
    return found


class GeneratorRun:
    """A generator that is started, followed on a thread, and started again up to ``restarts`` times when it failed.

    ``payload(key)`` gives the generator's argument anew for each start; ``key`` stands for this run in addresses.
    ``on_end(state, error)`` is called once, from a thread: ``finished``, ``failed``, ``stalled``, or what ``stop`` was
    told. A process that was not heard of for ``stall_s`` seconds is ended; 0 is never. Output goes to ``log_path``.
    Raises ``OSError`` when the process cannot be started.
    """

    def __init__(
        self,
        *,
        path: Path,
        payload: Callable[[str], Mapping[str, Any]],
        log_path: Path,
        on_end: Callable[[str, str], None],
        stall_s: float = 0.0,
        restarts: int = 0,
    ) -> None:
        self.key = secrets.token_urlsafe(16)
        self.restarts = 0
        self.last_error = ""
        self._path, self._payload, self._log_path, self._on_end = path, payload, log_path, on_end
        self._stall_s, self._most_restarts = stall_s, restarts
        self._ended_as: str | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._start()
        self._thread = threading.Thread(target=self._follow, name=f"generator-{self._process.pid}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._last_heard

    def heard(self) -> None:
        """The generator has asked something of the buffer."""
        self._last_heard = time.monotonic()

    def told(self, error: str) -> dict[str, Any]:
        """What is known of it beside its record, which has ``error``."""
        silent = {"silent_s": round(self.silent_s, 3)} if self.running else {}
        return {"restarts": self.restarts, "error": error or self.last_error, **silent}

    def stop(self, state: str) -> None:
        """End the process group, forcibly after a grace period. Returns when it is gone."""
        with self._lock:
            self._ended_as = self._ended_as or state
            self._stopping.set()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._thread.is_alive():
                self._signal(number)
                self._thread.join(_GRACE_S)

    def _start(self) -> None:
        with tempfile.TemporaryFile() as payload, self._log_path.open("ab") as log:
            payload.write(json_bytes(self._payload(self.key)))  # a file: no pipe holds it at once
            payload.seek(0)
            self._last_heard = time.monotonic()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agl_slime.buffer.runs", str(self._path.resolve()), str(payload.fileno())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[payload.fileno()],
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        logger.info("The generator %s runs as process %d.", self._path.name, self._process.pid)

    def _follow(self) -> None:
        while True:
            state, error = self._outcome()
            if state in ("failed", "stalled"):
                logger.error("The generator %s %s: %s", self._path.name, state, error)
                self.last_error = error
                if self.restarts < self._most_restarts and self._start_again():
                    continue
            self._on_end(self._ended_as or state, error)
            return

    def _start_again(self) -> bool:
        self.restarts += 1
        self._stopping.wait(min(_LONGEST_PAUSE_S, 0.25 * 4**self.restarts))
        with self._lock:
            if self._stopping.is_set():
                return False
            try:
                self._start()
            except Exception:  # the disk, the memory, the database: the run ends with what ended it before
                logger.exception("The generator %s could not be started again.", self._path.name)
                return False
        return True

    def _outcome(self) -> tuple[str, str]:
        """Wait for the end of the process; how it ended, and the error."""
        while True:
            try:
                code = self._process.wait(max(0.05, self._stall_s - self.silent_s) if self._stall_s else None)
                break
            except subprocess.TimeoutExpired:
                if self.silent_s >= self._stall_s:
                    self._signal(signal.SIGKILL)
                    self._process.wait()
                    return "stalled", f"nothing was heard of it for {self._stall_s:g} s"
        self._signal(signal.SIGKILL)  # workers that the generator started and left behind
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._ended_as or code == 0:
            return self._ended_as or "finished", ""
        with self._log_path.open("rb") as log:
            log.seek(max(0, self._log_path.stat().st_size - _TAIL_BYTES))
            tail = log.read().decode(errors="replace").strip()
        return "failed", f"exit code {code}; the end of {self._log_path}:\n{tail}"

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # gone already


def _main() -> None:
    """The generator's process: the file and the descriptor of its payload are the arguments."""
    buffer = os.fdopen(os.dup(0), "rb")
    with os.fdopen(int(sys.argv[2]), "rb") as file:
        payload = json_value(file.read())
    threading.Thread(target=_end_with, args=(buffer,), daemon=True).start()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # a generator that reads its input must not take the watch away
    import_file(sys.argv[1]).run_rollout(payload)


def _end_with(buffer: Any) -> None:
    buffer.read()  # nothing is ever written: this returns when the other end is closed
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    _main()
