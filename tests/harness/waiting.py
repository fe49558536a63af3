"""Waiting for conditions without an event: of other processes and of threads with their own event loop."""

import asyncio
import time
from collections.abc import Callable
from inspect import isawaitable
from typing import Any


async def until(condition: Callable[[], Any], within_s: float = 20.0) -> Any:
    """The first result of ``condition``, or of what it awaits, that is true."""
    deadline = time.monotonic() + within_s
    while True:
        result = condition()
        if result := await result if isawaitable(result) else result:
            return result
        assert time.monotonic() < deadline, f"the condition did not become true within {within_s} s"
        await asyncio.sleep(0.01)


def becomes_true(condition: Callable[[], object], within_s: float) -> bool:
    """Blocks until ``condition`` holds; False after ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(done)
