"""``python train.py`` in a separate process."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from agl_slime.support import watch

REPOSITORY = Path(__file__).resolve().parents[2]


class Run:
    """A running ``train.py``, read line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def until(self, start: str, timeout_s: float = 120.0) -> None:
        """Wait until a line begins with ``start``."""

        def printed() -> bool:
            return any(line.startswith(start) for line in self.lines)

        with self._changed:
            self._changed.wait_for(lambda: self._ended or printed(), timeout_s)
        assert printed(), self.text

    def children(self) -> list[psutil.Process]:
        """Its processes, without the child that watches."""
        return [child for child in children(self.process) if not watches(child)]

    def end(self, within_s: float = 60.0) -> tuple[int, float]:
        """The exit code, and the seconds until the exit."""
        began = time.monotonic()
        code = self.process.wait(within_s)
        took = time.monotonic() - began
        with self._changed:
            assert self._changed.wait_for(lambda: self._ended, 10)
        return code, took


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def watches(process: psutil.Process) -> bool:
    """Whether a process is the child that watches over its parent."""
    try:
        return watch.__file__ in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


@contextmanager
def train(*flags: object, environment: Mapping[str, str] | None = None) -> Iterator[Run]:
    """``environment`` beside this process's own."""
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
    command = [sys.executable, str(REPOSITORY / "train.py"), "--view", "lines", *map(str, flags)]
    # a session of its own: a signal to the test does not reach it
    options = {"cwd": REPOSITORY, "env": variables, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    try:
        yield Run(process)
    finally:
        for child in children(process) if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait(10)
        assert process.stdout is not None
