"""The answer to one request while it is made; those who wait for it come and go."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine
from typing import Any

from agl_slime.gateway.calls import Answered


class Work:
    """The answer to one request in the making: ``texts`` are its choices so far, ``version`` counts their changes.
    Cancelled when nobody waits for it any more. ``id`` and ``created`` are those of the answer."""

    def __init__(self, n: int, prefix: str) -> None:
        self.id, self.created = prefix + secrets.token_hex(12), int(time.time())
        self.texts: list[tuple[str, str]] = [("", "")] * n
        self.version = 0
        self.task: asyncio.Task[Answered] | None = None
        self._changed = asyncio.Event()
        self._waiting = 0

    def start(self, work: Coroutine[Any, Any, Answered]) -> asyncio.Task[Answered]:
        self.task = asyncio.ensure_future(work)
        self.task.add_done_callback(self._done)
        return self.task

    def update(self, index: int, texts: tuple[str, str]) -> None:
        if texts != self.texts[index]:
            self.texts[index] = texts
            self._notify()

    def _done(self, task: asyncio.Task[Answered]) -> None:
        self._notify()
        if not task.cancelled():
            task.exception()  # it is told to whoever waits; nobody may be there

    def _notify(self) -> None:
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self, after: int, timeout_s: float) -> bool:
        """Until there is a later version than ``after``, or the end; ``False`` when the time is over first."""
        if self.version == after:
            try:
                await asyncio.wait_for(self._changed.wait(), timeout_s)
            except asyncio.TimeoutError:
                return False
        return True

    async def result(self) -> Answered:
        assert self.task is not None
        return await asyncio.shield(self.task)

    def __enter__(self) -> Work:
        self._waiting += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._waiting -= 1
        if not self._waiting and self.task is not None and not self.task.done():
            self.task.cancel()
