"""Servers on an event loop in another thread."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

from agl_slime.support.threads import LoopThread

T = TypeVar("T")


@contextmanager
def in_thread(context: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """The value of ``context``, which runs on an event loop in another thread; its exceptions are raised here."""
    entered: list[T] = []
    ended = asyncio.Event()

    async def stay(ready: Callable[[], None]) -> None:
        async with context as value:
            entered.append(value)
            ready()
            await ended.wait()

    thread = LoopThread(stay, name="test-server")
    thread.start()
    if not entered:
        assert thread.failure is not None
        raise thread.failure
    try:
        yield entered[0]
    finally:
        thread.call(ended.set)
        assert thread.join(30), "the server does not stop"
        if thread.failure is not None:
            raise thread.failure
