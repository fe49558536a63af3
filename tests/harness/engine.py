"""The embedded engine in a thread of the test's own process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agl_slime.engine.server import load_server
from tests.harness.loop_thread import in_thread


@contextmanager
def engine_in_thread(policy: Path, **limits: Any) -> Iterator[str]:
    """Its URL. ``EmbeddedEngine`` starts a process, which imports torch and transformers for seconds; it is for tests
    of the process itself. ``limits`` are those of ``agl_slime.engine.engine.Engine``."""
    server = load_server(str(policy), token=None, **limits)
    with in_thread(server.listening(host="127.0.0.1", port=0)) as url:
        yield url
