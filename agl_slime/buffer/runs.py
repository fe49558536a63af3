"""Generators: finding their files, the record of their runs in the database, and their processes.

A file named ``*_generator.py`` in a directory that a person named has ``TASK_TYPE`` and ``run_rollout``.

A generator runs in a process of its own, which leads a process group. When its standard input ends, the buffer is gone,
and the group ends with it, so that no generator is left behind.
"""

from __future__ import annotations

import hashlib
import importlib.util
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
from typing import Any, NamedTuple

import orjson

from agl_slime.buffer.pipeline import STAGE_NAMES
from agl_slime.support.database import Database

logger = logging.getLogger(__name__)

# What of a generator's output is shown when it fails; all of it is in its log file.
_TAIL_BYTES = 4000
_GRACE_S = 3.0
_LONGEST_PAUSE_S = 60.0

INTERRUPTED = "interrupted"

SHIPPED_GENERATORS = Path(__file__).parent / "generators"


class Generator(NamedTuple):
    """A usable generator file and the stages that it brings."""

    path: Path
    stages: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Discovery:
    """What a directory holds: generators by task type, and by file name what is wrong with the others."""

    generators: dict[str, Generator] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)


def discover_generators(directory: Path) -> Discovery:
    """Load every ``*_generator.py`` of the directory. Broken files and second files for a task type are reported and
    left out."""
    found = Discovery()
    for path in sorted(directory.glob("*_generator.py")):
        try:
            module = load_generator(path)
            task_type = getattr(module, "TASK_TYPE", None)
            if not isinstance(task_type, str) or not task_type:
                raise TypeError(f"TASK_TYPE is {task_type!r}; expected a name")
            if not callable(getattr(module, "run_rollout", None)):
                raise TypeError("run_rollout(data) is missing")
        except (Exception, SystemExit) as error:  # a file of somebody else's may do anything while it is loaded
            problem = f"cannot be used: {type(error).__name__}: {error}"
        else:
            if task_type not in found.generators:
                stages = {name: stage for name in STAGE_NAMES if callable(stage := getattr(module, name, None))}
                found.generators[task_type] = Generator(path, stages)
                continue
            problem = f"has the task type {task_type!r} of {found.generators[task_type].path.name} and is left out"
        found.problems[path.name] = problem
        logger.warning("The generator %s %s", path, problem)
    return found


def load_generator(path: Path) -> ModuleType:
    """Import a file under a name of its own. Its directory is searched for imports after everything else."""
    directory = str(path.parent)
    if directory not in sys.path:
        sys.path.append(directory)
    name = f"agl_slime_generator_{path.stem}_{hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class RunRecords:
    """The runs of all task types, in the database of an ``ItemStore``."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    def start(self, task: str, payload: Mapping[str, Any]) -> int:
        """Record that a generator runs; earlier ones of the task type have been replaced. Returns the run's number."""
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE runs SET state = 'replaced', ended = ? WHERE task = ? AND state = 'running'",
                (self._clock(), task),
            )
            (finished,) = connection.execute("SELECT coalesce(max(no), 0) FROM finished").fetchone()
            cursor = connection.execute(
                "INSERT INTO runs (task, payload, finished_before, state, started) VALUES (?, ?, ?, 'running', ?)",
                (task, orjson.dumps(payload).decode(), finished, self._clock()),
            )
            return int(cursor.lastrowid or 0)

    def end(self, no: int, state: str, error: str = "") -> None:
        with self._database.transaction() as connection:
            connection.execute(
                "UPDATE runs SET state = ?, error = ?, ended = ? WHERE no = ? AND state = 'running'",
                (state, error, self._clock(), no),
            )

    def latest(self) -> dict[str, dict[str, Any]]:
        """The latest run of each task type, as its row with ``payload`` decoded."""
        names = ("no", "payload", "state", "error", "started", "ended")
        latest = "SELECT max(no) FROM runs GROUP BY task"
        query = f"SELECT task, {', '.join(names)} FROM runs WHERE no IN ({latest})"
        with self._database.reading() as connection:
            rows = {row[0]: dict(zip(names, row[1:], strict=True)) for row in connection.execute(query)}
        return {task: {**row, "payload": orjson.loads(row["payload"])} for task, row in rows.items()}

    def finished_since(self, no: int) -> list[Any]:
        """Instances that were finished since this run was started, each as often as it was."""
        query = (
            "SELECT instance_id FROM finished JOIN runs USING (task) "
            "WHERE runs.no = ? AND finished.no > finished_before ORDER BY finished.no"
        )
        with self._database.reading() as connection:
            return [orjson.loads(row[0]) for row in connection.execute(query, (no,))]


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
        self._signal(signal.SIGTERM)
        self._thread.join(_GRACE_S)
        if self._thread.is_alive():
            self._signal(signal.SIGKILL)
            self._thread.join(_GRACE_S)

    def _start(self) -> None:
        with tempfile.TemporaryFile() as payload, self._log_path.open("ab") as log:
            payload.write(orjson.dumps(self._payload(self.key)))  # a file: no pipe holds it at once
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
                if self._start_again():
                    continue
            self._on_end(self._ended_as or state, error)
            return

    def _start_again(self) -> bool:
        if self.restarts >= self._most_restarts:
            return False
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
        payload = orjson.loads(file.read())
    threading.Thread(target=_end_with, args=(buffer,), daemon=True).start()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # a generator that reads its input must not take the watch away
    load_generator(Path(sys.argv[1])).run_rollout(payload)


def _end_with(buffer: Any) -> None:
    buffer.read()  # nothing is ever written: this returns when the other end is closed
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    _main()
