"""The client's side of a Rollout Buffer: one request, and a writer for generators that shares requests and outlasts a
buffer that is away for a while."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import aiohttp
import orjson

from agl_slime.buffer.batching import Batcher
from agl_slime.buffer.errors import BufferRequestError
from agl_slime.buffer.stages import Item
from agl_slime.errors import AglSlimeError
from agl_slime.support.backoff import Backoff

_MOST_ITEMS = 64
_MOST_BYTES = 4_000_000
_LONGEST_PAUSE_S = 10.0


class BufferUnreachableError(AglSlimeError, ConnectionError):
    """The buffer did not take an item within the time that was given to it."""


async def ask_buffer(
    url: str, path: str, body: Any = None, *, token: str | None = None, timeout_s: float = 90.0
) -> Any:
    """One request to the buffer at ``url``, a GET without ``body``; returns the answer's JSON.

    Raises:
        aiohttp.ClientError: the buffer cannot be reached; ``ClientResponseError`` with its text when it answers with an
            error.
        ValueError: the answer is not JSON.
        asyncio.TimeoutError: no answer within ``timeout_s`` seconds.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else None
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s), headers=headers) as session,
        session.request("GET" if body is None else "POST", url.rstrip("/") + path, json=body) as response,
    ):
        raw = await _content(response)
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{url}{path} did not answer with JSON: {error}") from error


async def _content(response: aiohttp.ClientResponse) -> bytes:
    raw = await response.read()
    if response.status >= 400:
        message, info = raw[:500].decode(errors="replace"), response.request_info
        raise aiohttp.ClientResponseError(info, response.history, status=response.status, message=message)
    return raw


def is_passing(error: Exception) -> bool:
    """Whether the same request may succeed later: broken connections, time-outs, 429 and 5xx."""
    if isinstance(error, aiohttp.ClientResponseError):
        return error.status >= 500 or error.status == 429
    return isinstance(error, (aiohttp.ClientError, asyncio.TimeoutError, OSError))


class BufferWriter:
    """``await write(item)`` returns when the buffer has stored the item.

    Items that are written at the same time go in one request. What ``is_passing`` is tried again until ``give_up_s``
    have passed; an item's ``uid`` makes sure that a repeated request is stored once. An item that is refused (4xx) or
    has no form in JSON raises ``BufferRequestError``, and costs no other item.
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
        # one request is made while the other is answered
        self._batches = Batcher(self._send, most=_MOST_ITEMS, parallel=2, size=len, most_size=_MOST_BYTES)

    async def __aenter__(self) -> BufferWriter:
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._batches.close(cancel=True)
        await self._session.close()

    async def write(self, item: Item) -> None:
        """Store one item. An item without ``uid`` gets one, so that it can be sent again."""
        try:
            body = orjson.dumps(item if item.get("uid") is not None else {**item, "uid": uuid.uuid4().hex})
        except TypeError as error:  # numpy's numbers, objects, lone surrogates
            raise BufferRequestError(f"item {item.get('uid')!r} is no JSON: {error}") from error
        await self._batches.add(body)

    async def _send(self, bodies: list[bytes]) -> list[BufferRequestError | None]:
        what = f"the buffer at {self._url} took nothing"
        backoff = Backoff(what, BufferUnreachableError, cap_s=_LONGEST_PAUSE_S, patience_s=self._give_up_s)
        try:
            await backoff.run(lambda: self._post(b"[" + b",".join(bodies) + b"]"), is_passing)
        except aiohttp.ClientResponseError as error:
            if len(bodies) == 1:
                return [BufferRequestError(f"the buffer refused an item: {error.message}", status=error.status)]
            # a request is refused as a whole; one bad item must not cost the others
            return [result for body in bodies for result in await self._send([body])]
        return [None] * len(bodies)

    async def _post(self, body: bytes) -> None:
        async with self._session.post(self._url, data=body) as response:
            await _content(response)


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
    told = {"uid": uid, "instance_id": instance_id, "messages": messages, "reward": reward, "extra_info": extra_info}
    return {**told, **fields}
