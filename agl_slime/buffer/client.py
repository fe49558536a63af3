"""Writing to a Rollout Buffer from a generator: concurrent writes share requests, and a write survives a buffer that is
away for a while."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from agl_slime.buffer.errors import BufferRequestError
from agl_slime.buffer.stages import Item
from agl_slime.errors import AglSlimeError

logger = logging.getLogger(__name__)

_MOST_ITEMS = 64
_MOST_BYTES = 4_000_000
_LONGEST_PAUSE_S = 10.0


class BufferUnreachableError(AglSlimeError, ConnectionError):
    """The buffer did not take an item within the time that was given to it."""


class BufferWriter:
    """``await write(item)`` returns when the buffer has stored the item.

    Items that are written at the same time go in one request. Broken connections, 429 and 5xx are tried again with
    growing pauses until ``give_up_s`` have passed; an item's ``uid`` makes sure that a repeated request is stored once.
    A refusal (4xx) raises ``BufferRequestError``, for the refused item only.
    """

    def __init__(
        self, *, url: str, token: str | None = None, give_up_s: float = 600.0, request_timeout_s: float = 60.0
    ) -> None:
        self._url = url.rstrip("/") + "/buffer/write"
        self._headers = {"Prefer": "return=minimal", "Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._give_up_s = give_up_s
        self._timeout = aiohttp.ClientTimeout(total=request_timeout_s)
        self._waiting: deque[tuple[bytes, asyncio.Future[None]]] = deque()
        self._arrived = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._senders: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> BufferWriter:
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout)
        self._senders = [
            asyncio.create_task(self._send_waiting()) for _ in range(2)
        ]  # one request is made while the other is answered
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        for sender in self._senders:
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def write(self, item: Item) -> None:
        """Store one item. An item without ``uid`` gets one, so that it can be sent again."""
        body = orjson.dumps(item if item.get("uid") is not None else {**item, "uid": uuid.uuid4().hex})
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((body, stored))
        self._arrived.set()
        await stored

    async def _send_waiting(self) -> None:
        while True:
            await self._arrived.wait()
            batch: list[tuple[bytes, asyncio.Future[None]]] = []
            size = 0
            while self._waiting and len(batch) < _MOST_ITEMS and size < _MOST_BYTES:
                entry = self._waiting.popleft()
                batch.append(entry)
                size += len(entry[0])
            if not self._waiting:
                self._arrived.clear()
            try:
                await self._send(batch)
            except BaseException as error:
                for _, stored in batch:
                    if not stored.done():
                        stored.set_exception(
                            error if isinstance(error, Exception) else BufferUnreachableError("the writer was closed")
                        )
                if not isinstance(error, Exception):
                    raise

    async def _send(self, batch: Sequence[tuple[bytes, asyncio.Future[None]]]) -> None:
        if not batch:
            return
        try:
            await self._post(b"[" + b",".join(body for body, _ in batch) + b"]")
        except BufferRequestError as refusal:
            if len(batch) == 1:
                batch[0][1].set_exception(refusal)
                return
            for entry in batch:  # a request is refused as a whole; one bad item must not cost the others
                await self._send([entry])
            return
        for _, stored in batch:
            if not stored.done():
                stored.set_result(None)

    async def _post(self, body: bytes) -> None:
        deadline = time.monotonic() + self._give_up_s
        pause = 0.1
        assert self._session is not None
        while True:
            try:
                async with self._session.post(self._url, data=body) as response:
                    if response.status == 200:
                        return
                    text = (await response.text())[:500]
                    if response.status < 500 and response.status != 429:
                        raise BufferRequestError(
                            f"the buffer refused an item with status {response.status}: {text}", status=response.status
                        )
                    trouble = f"status {response.status}: {text}"
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
                trouble = f"{type(error).__name__}: {error}"
            if time.monotonic() + pause > deadline:
                raise BufferUnreachableError(
                    f"the buffer at {self._url} took nothing for {self._give_up_s:g} s; last: {trouble}"
                )
            logger.info("The buffer did not take a write (%s); trying again.", trouble)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(_LONGEST_PAUSE_S, 2 * pause)


def item_of(
    *,
    uid: str,
    instance_id: Any,
    messages: list[dict[str, Any]],
    reward: float,
    extra_info: dict[str, Any],
    **fields: Any,
) -> Item:
    """An item with the fields that every reader expects; ``fields`` are kept beside them."""
    return {
        "uid": uid,
        "instance_id": instance_id,
        "messages": messages,
        "reward": reward,
        "extra_info": extra_info,
        **fields,
    }
