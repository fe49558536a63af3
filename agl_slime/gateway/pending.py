"""``PendingResponse``: the response to one request while the engine samples it; several clients may wait for it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any

from agl_slime.engine.client.resumable import Progress
from agl_slime.gateway.calls import CallResult

_MAX_RESPONSES, _MAX_UNANSWERED = 32, 256  # of an attempt, remembered for retries


class PendingResponse:
    """A task that makes the response to one request; cancelled when its last client has left.

    ``key`` is the digest of the request, ``id`` and ``created`` are the response's. ``texts`` has the choices so far
    and ``version`` counts their changes. ``received``: a client got the whole response. ``nodes`` are its answers in
    the tree; ``delivered`` is the engine's progress on each choice when the stream was last written to.
    """

    def __init__(
        self, *, key: bytes, n: int, prefix: str, answer: Callable[[PendingResponse], Coroutine[Any, Any, CallResult]]
    ) -> None:
        self.id, self.created, self.key = prefix + secrets.token_hex(12), int(time.time()), key
        self.texts: list[tuple[str, str]] = [("", "")] * n
        self.progress: list[Progress | None] = [None] * n
        self.delivered = self.progress
        self.version = 0
        self.received = self.abandoned = False
        self.nodes: list[Any] = []
        self.clients = 0
        self._changed = asyncio.Event()
        self.task = asyncio.ensure_future(answer(self))
        self.task.add_done_callback(self._on_done)

    @property
    def usable(self) -> bool:
        """Neither failed nor cancelled so far."""
        return not self.abandoned and not (self.task.done() and (self.task.cancelled() or self.task.exception()))

    def update(self, index: int, texts: tuple[str, str], progress: Progress) -> None:
        if texts != self.texts[index]:
            self.progress = [*self.progress[:index], progress, *self.progress[index + 1 :]]
            self.texts[index] = texts
            self._notify()

    def _on_done(self, task: asyncio.Task[CallResult]) -> None:
        self._notify()
        if not task.cancelled():
            task.exception()  # mark as retrieved: all clients may have left

    def _notify(self) -> None:
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self, version: int, timeout_s: float) -> bool:
        """Wait for a version after ``version``, or the end; ``False`` at the timeout."""
        if self.version == version:
            try:
                await asyncio.wait_for(self._changed.wait(), timeout_s)
            except TimeoutError:
                return False
        return True

    async def result(self) -> CallResult:
        return await asyncio.shield(self.task)

    def __enter__(self) -> PendingResponse:
        self.clients += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.clients -= 1
        if not self.clients and not self.task.done():
            self.abandoned = True
            self.task.cancel()


class RecentResponses:
    """The latest responses of an attempt, for clients that retry a request whose response they did not get."""

    def __init__(self) -> None:
        self.responses: deque[PendingResponse] = deque()
        self._unanswered: Counter[bytes] = Counter()  # requests without a response, by key: a retry starts one

    def add(self, response: PendingResponse, pending: int) -> None:
        self.responses.append(response)
        while len(self.responses) > _MAX_RESPONSES + pending:
            self.responses.popleft()

    def note_unanswered(self, key: bytes) -> None:
        """Count a request that has no usable response."""
        self._unanswered[key] += 1
        if len(self._unanswered) > _MAX_UNANSWERED:
            del self._unanswered[next(iter(self._unanswered))]

    def forget(self, node: Any) -> None:
        """Drop the received response with this answer: its client continued from it and will not retry."""
        if node is not None:
            self.responses = deque(r for r in self.responses if not r.received or node not in r.nodes)

    def find(self, key: bytes) -> PendingResponse | None:
        """The pending or finished response to a retried request; ``None`` if unknown or ambiguous."""
        repeats = [response for response in self.responses if response.key == key and response.usable]
        lost = [repeat for repeat in repeats if repeat.task.done() and not repeat.received and not repeat.clients]
        if lost:
            return lost[0]
        if self._unanswered[key]:
            self._unanswered[key] -= 1
            return None
        return repeats[0] if len(repeats) == 1 else None
