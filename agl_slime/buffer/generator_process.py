"""Starting, watching and ending the process of a generator."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson

logger = logging.getLogger(__name__)

# What of a generator's output is shown when it fails; all of it is in its log file.
_TAIL_BYTES = 4000
_GRACE_S = 3.0

EndListener = Callable[[str, str], None]


class GeneratorProcess:
    """One run of a generator. ``on_end(state, error)`` is called once, from a thread: ``finished``, ``failed``,
    ``stalled`` or ``stopped``.

    Output goes to ``log_path``. A run that has not been heard of (``heard``) for ``stall_s`` seconds is ended; 0 is
    never.
    """

    def __init__(
        self, *, path: Path, payload: Mapping[str, Any], log_path: Path, on_end: EndListener, stall_s: float = 0.0
    ) -> None:
        self.log_path = log_path
        self._stall_s = stall_s
        self._on_end = on_end
        self._ended_as: str | None = None
        self._last_heard = time.monotonic()
        self._ended = threading.Event()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "agl_slime.buffer.generator_main", str(path.resolve())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(orjson.dumps(payload) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            logger.debug("The generator %s ended before it read its payload.", path)  # the watcher tells why
        threading.Thread(target=self._watch, name=f"generator-{self._process.pid}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    @property
    def silent_s(self) -> float:
        """Seconds since the generator was last heard of."""
        return time.monotonic() - self._last_heard

    def heard(self) -> None:
        """The generator has asked something of the buffer."""
        self._last_heard = time.monotonic()

    def stop(self, state: str = "stopped") -> None:
        """End the process group, forcibly after a grace period. Returns when it is gone."""
        if self._ended_as is None:
            self._ended_as = state
        self._signal(signal.SIGTERM)
        if not self._ended.wait(_GRACE_S):
            self._signal(signal.SIGKILL)
            self._ended.wait(_GRACE_S)

    def _watch(self) -> None:
        while True:
            timeout = max(0.05, self._stall_s - self.silent_s) if self._stall_s else None
            try:
                code = self._process.wait(timeout)
                break
            except subprocess.TimeoutExpired:
                if self.silent_s >= self._stall_s:
                    self._ended_as = self._ended_as or "stalled"
                    self._signal(signal.SIGKILL)
        self._signal(signal.SIGKILL)  # workers that the generator started and left behind
        if self._process.stdin is not None:
            self._process.stdin.close()
        state = self._ended_as or ("finished" if code == 0 else "failed")
        error = ""
        if state == "stalled":
            error = f"nothing was heard of it for {self._stall_s:g} s"
        elif state == "failed":
            error = f"exit code {code}; the end of {self.log_path}:\n{self._tail()}"
        try:
            self._on_end(state, error)
        finally:
            self._ended.set()

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # gone already

    def _tail(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace").strip()
