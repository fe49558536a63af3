"""What comes in one by one is handed on together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Entry = TypeVar("Entry")
Result = TypeVar("Result")


class Batcher(Generic[Entry, Result]):
    """``await add(entry)`` gives the entry's result of ``handle(entries)``, called with all that waits when a call
    before it has ended, ``parallel`` calls at a time.

    ``handle`` returns a result or an exception for each entry; what it raises is raised for all of them. ``most`` and
    ``most_size`` (of ``size(entry)``) bound a call. After ``close()`` what was added is still handled.
    """

    def __init__(
        self,
        handle: Callable[[list[Entry]], Awaitable[Sequence[Result | Exception]]],
        *,
        most: int,
        parallel: int = 1,
        size: Callable[[Entry], int] = lambda entry: 0,
        most_size: int = 1,
    ) -> None:
        self._handle, self._most, self._parallel, self._size, self._most_size = handle, most, parallel, size, most_size
        self._waiting: deque[tuple[Entry, asyncio.Future[Result]]] = deque()
        self._running: set[asyncio.Task[None]] = set()

    async def add(self, entry: Entry) -> Result:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((entry, future))
        if len(self._running) < self._parallel:
            task = asyncio.create_task(self._run())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return await future

    async def close(self, *, cancel: bool = False) -> None:
        for task in self._running if cancel else ():
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _run(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft()]
            size = self._size(batch[0][0])
            while self._waiting and len(batch) < self._most and size < self._most_size:
                batch.append(self._waiting.popleft())
                size += self._size(batch[-1][0])
            try:
                results = await self._handle([entry for entry, _ in batch])
            except asyncio.CancelledError:
                for _, future in batch:
                    future.cancel()
                raise
            except Exception as error:
                results = [error] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)
