"""Discovery of generators, and their processes.

A generator is a file ``*_generator.py`` with ``TASK_TYPE`` and ``run_rollout``, in a directory that the user chose. It
runs in a separate process, the leader of a process group. The end of its standard input means that the buffer is gone;
the whole group then ends, so that no generator is left behind.
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

from agl_slime.agent.user_files import import_file
from agl_slime.buffer.pipeline import GroupPipeline
from agl_slime.buffer.settings import PipelineSettings
from agl_slime.support.child import Child, Supervisor
from agl_slime.support.http import json_bytes, json_value

logger = logging.getLogger(__name__)

_GRACE_S = 3.0
_LONGEST_PAUSE_S = 60.0

INTERRUPTED = "interrupted"

SHIPPED_GENERATORS = Path(__file__).parent / "generators"


@dataclass(frozen=True, slots=True)
class Discovery:
    """A directory's generators by task type, and the problems of other files by file name."""

    generators: dict[str, ModuleType] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def file_of(generator: ModuleType) -> Path:
    return Path(str(generator.__file__))


def discover_generators(directory: Path) -> Discovery:
    """Load every ``*_generator.py`` of the directory, but broken files and further files for a task type."""
    discovery = Discovery()
    for path in sorted(directory.glob("*_generator.py")):
        try:
            module = import_file(path, reload=True)
            task_type = getattr(module, "TASK_TYPE", None)
            if not isinstance(task_type, str) or not task_type:
                raise TypeError(f"TASK_TYPE is {task_type!r}; expected a name")
            if not callable(getattr(module, "run_rollout", None)):
                raise TypeError("run_rollout(data) is missing")
            GroupPipeline(vars(module), settings=PipelineSettings())  # checks its stages
        except (Exception, SystemExit) as error:  # loading a user's file may do anything
            problem = f"cannot be used: {type(error).__name__}: {error}"
        else:
            if task_type not in discovery.generators:
                discovery.generators[task_type] = module
                continue
            first = file_of(discovery.generators[task_type]).name
            problem = f"has the task type {task_type!r} of {first} and is left out"
        discovery.problems[path.name] = problem
        logger.warning("The generator %s %s", path, problem)
    return discovery


class GeneratorRun:
    """A generator's process, started again after failures up to ``restarts`` times.

    ``payload(key)`` returns the generator's argument for each start; ``key`` identifies this run in URLs.
    ``on_end(state, error)`` is called once, from a thread, with ``finished``, ``failed``, ``stalled``, or the state
    passed to ``stop``. A process without a request for ``stall_s`` seconds is killed; 0 is never. Output goes to
    ``log_path``. Raises ``OSError`` when the process cannot be started.
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
        self._path, self._payload, self._log_path = path, payload, log_path
        self._stall_s = stall_s
        self._state, self._error = "", ""
        self._ended_as: str | None = None
        self._supervisor = Supervisor(
            launch=self._start,
            follow=self._follow,
            on_lost=lambda _: on_end(self._ended_as or self._state, self._error),
            kill=Child.stop,
            restarts=restarts,
            pause_s=lambda number: min(_LONGEST_PAUSE_S, 0.25 * 4**number),
        )
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._supervisor.start()

    @property
    def running(self) -> bool:
        return self._supervisor.running

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._last_request

    def note_request(self) -> None:
        """Reset the stall timer: the generator has sent a request."""
        self._last_request = time.monotonic()

    def status(self, error: str) -> dict[str, Any]:
        """The run's part of ``/stats`` that its database record lacks; ``error`` is the record's."""
        silent = {"silent_s": round(self.silent_s, 3)} if self.running else {}
        return {"restarts": self._supervisor.restarts, "error": error or self._error, **silent}

    def stop(self, state: str) -> None:
        """End the process group, by SIGKILL after a grace period; returns when it is gone."""
        self._ended_as = self._ended_as or state
        self._supervisor.stop()
        for child in self._supervisor.unended_after(0.0):
            child.stop()
        self._supervisor.join(_GRACE_S)

    def _start(self) -> tuple[str, Child]:
        with tempfile.TemporaryFile() as payload:
            payload.write(json_bytes(self._payload(self.key)))  # a file, as it may exceed a pipe's capacity
            payload.seek(0)
            self._last_request = time.monotonic()
            child = Child(
                [sys.executable, "-m", "agl_slime.buffer.runs", self._path.resolve(), str(payload.fileno())],
                name=f"the generator {self._path.name}",
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                log=self._log_path,
                stdin=subprocess.PIPE,
                pass_fds=[payload.fileno()],
            ).start()
        logger.info("The generator %s runs as process %d.", self._path.name, child.pid)
        return str(child.pid), child

    def _follow(self, name: str, child: Child) -> str:
        stalled, code = False, None
        while code is None and not stalled:
            code = child.wait(max(0.05, self._stall_s - self.silent_s) if self._stall_s else None)
            stalled = code is None and self.silent_s >= self._stall_s
        ended = child.ending()
        child.stop(0.0 if stalled else _GRACE_S)  # with what it has started
        if self._ended_as or code == 0:
            self._state, self._error = "finished", ""
            return ""
        self._state, self._error = ("stalled", f"no request for {self._stall_s:g} s") if stalled else ("failed", ended)
        logger.error("The generator %s %s: %s", self._path.name, self._state, self._error)
        return self._error


def _main() -> None:
    """The generator's process; its arguments are the file and the descriptor of its payload."""
    from_buffer = os.fdopen(os.dup(0), "rb")
    with os.fdopen(int(sys.argv[2]), "rb") as file:
        payload = json_value(file.read())
    threading.Thread(target=_end_with_buffer, args=(from_buffer,), daemon=True).start()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # a generator that reads its standard input must not consume the pipe
    import_file(sys.argv[1]).run_rollout(payload)


def _end_with_buffer(pipe: Any) -> None:
    pipe.read()  # returns when the buffer's process closes the pipe: nothing is ever written
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    _main()
