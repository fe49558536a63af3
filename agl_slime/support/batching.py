"""Batch concurrent calls into one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Entry = TypeVar("Entry")
Result = TypeVar("Result")


class Batcher(Generic[Entry, Result]):
    """``await add(entry)`` returns the entry's result of ``handle(entries)``, which is called with all waiting entries
    as soon as an earlier call has ended: at most ``parallel`` calls at a time, started ``between_s`` apart. For one
    event loop.

    ``handle`` returns a result or an exception for each entry; an exception that it raises is raised for all of them.
    ``most`` and ``most_size`` (of ``size(entry)``) bound a call. ``close()`` waits for the waiting entries, or cancels
    their calls: their callers then get a ``ConnectionError``.
    """

    def __init__(
        self,
        handle: Callable[[list[Entry]], Awaitable[Sequence[Result | Exception]]],
        *,
        most: int,
        parallel: int = 1,
        between_s: float = 0.0,
        size: Callable[[Entry], int] = lambda entry: 0,
        most_size: int = 1,
    ) -> None:
        self._handle, self._most, self._size, self._most_size = handle, most, size, most_size
        self._parallel, self._between_s, self._next_start = parallel, between_s, 0.0
        self._waiting: deque[tuple[Entry, asyncio.Future[Result]]] = deque()
        self._running: set[asyncio.Task[None]] = set()

    async def add(self, entry: Entry) -> Result:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, future))
        # a task that has just ended no longer takes this entry
        self._running = {task for task in self._running if not task.done()}
        if len(self._running) < self._parallel:
            self._running.add(asyncio.create_task(self._run()))
        return await future

    async def close(self, *, cancel: bool = False) -> None:
        for task in self._running if cancel else ():
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            if (early_s := self._next_start - loop.time()) > 0:
                await asyncio.sleep(early_s)
                continue
            self._next_start = loop.time() + self._between_s
            batch = [self._waiting.popleft()]
            size = self._size(batch[0][0])
            while self._waiting and len(batch) < self._most and size < self._most_size:
                batch.append(self._waiting.popleft())
                size += self._size(batch[-1][0])
            results: Sequence[Result | Exception] = [ConnectionError("closed before there was an answer")] * len(batch)
            try:
                results = await self._handle([entry for entry, _ in batch])
            except Exception as error:
                results = [error] * len(batch)
            finally:
                for (_, future), result in zip(batch, results, strict=True):
                    if future.done():
                        continue  # its caller was cancelled
                    if isinstance(result, Exception):
                        future.set_exception(result)
                    else:
                        future.set_result(result)
