"""The answer to one request while it is made; those who wait for it come and go."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

from agl_slime.gateway.calls import Answered
from agl_slime.sglang.resumable import Progress


class Work:
    """The answer to one request in the making: ``texts`` are its choices so far, ``version`` counts their changes.
    Cancelled when nobody waits for it any more. ``id`` and ``created`` are those of the answer, ``key`` is what was
    asked; ``told``: somebody has got all of it; ``nodes`` are its answers in the tree. ``delivered`` is what the engine
    had told of each choice when its stream was last written to."""

    def __init__(
        self, *, key: bytes, n: int, prefix: str, answer: Callable[[Work], Coroutine[Any, Any, Answered]]
    ) -> None:
        self.id, self.created, self.key = prefix + secrets.token_hex(12), int(time.time()), key
        self.texts: list[tuple[str, str]] = [("", "")] * n
        self.progress: list[Progress | None] = [None] * n
        self.delivered = self.progress
        self.version = 0
        self.told = self.given_up = False
        self.nodes: list[Any] = []
        self.waiting = 0
        self._changed = asyncio.Event()
        self.task = asyncio.ensure_future(answer(self))
        self.task.add_done_callback(self._done)

    @property
    def stands(self) -> bool:
        """Neither failed nor cancelled, as far as it has come."""
        return not self.given_up and not (self.task.done() and (self.task.cancelled() or self.task.exception()))

    def update(self, index: int, texts: tuple[str, str], progress: Progress) -> None:
        if texts != self.texts[index]:
            self.progress = [*self.progress[:index], progress, *self.progress[index + 1 :]]
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
            except TimeoutError:
                return False
        return True

    async def result(self) -> Answered:
        return await asyncio.shield(self.task)

    def __enter__(self) -> Work:
        self.waiting += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.waiting -= 1
        if not self.waiting and not self.task.done():
            self.given_up = True
            self.task.cancel()
