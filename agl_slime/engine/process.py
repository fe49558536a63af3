"""``EmbeddedEngine``: the embedded engine as a child process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

from agl_slime.support.child import ServerChild, spawn
from agl_slime.support.threads import usable_cores

_PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
_ahead: list[tuple[subprocess.Popen[Any], IO[bytes]]] = []


@contextlib.contextmanager
def embedded_engine_ahead() -> Iterator[None]:
    """Begin the imports of the block's first ``EmbeddedEngine``, in its process, beside this process's own imports.
    Without an engine that process ends with the block, or with this process."""
    stderr = tempfile.TemporaryFile()  # noqa: SIM115
    ahead = spawn([*_ENGINE, "--wait"], output=stderr, env={**os.environ, **_VARIABLES}, **_PIPES), stderr
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
_VARIABLES["AGL_SLIME_ENGINE_TOKEN"] = ""  # of an engine that others reach: clients of this one send none


class EmbeddedEngine(ServerChild):
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
            served=str(model_path),
            start_timeout_s=start_timeout_s,
            env={**os.environ, **_VARIABLES, **(env or {})},
        )
        self._flags = None if env else command

    def _spawn(self) -> subprocess.Popen[Any]:
        if self._flags is None or not _ahead:
            return super()._spawn()
        process, self._output = _ahead.pop()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as stdin:  # its end is seen where its answer is read
            stdin.write(json.dumps(self._flags) + "\n")
        return process
