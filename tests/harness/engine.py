"""The embedded engine in a thread of the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agl_slime.engine.server import load_server
from agl_slime.support.http import listening
from agl_slime.support.threads import LoopThread


@contextmanager
def engine_in_thread(policy: Path, **limits: Any) -> Iterator[str]:
    """Its URL. ``EmbeddedEngine`` starts a process, which imports torch and transformers for seconds; it is for tests
    of the process itself. ``limits`` are those of ``agl_slime.engine.engine.Engine``."""
    server = load_server(str(policy), token=None, **limits)
    address: list[str] = []
    stop = asyncio.Event()

    async def serve(ready: Callable[[], None]) -> None:
        options = {"handler_cancellation": True, "shutdown_timeout": 0.5}
        async with listening(server.application(), host="127.0.0.1", port=0, backlog=4096, **options) as url:
            address.append(url)
            ready()
            await stop.wait()

    thread = LoopThread(serve, name="engine-in-thread")
    thread.start()
    if thread.failure is not None:
        raise thread.failure
    try:
        yield address[0]
    finally:
        thread.call(stop.set)
        assert thread.join(30)
