"""The client's side of a Rollout Buffer: one request; for generators what there is to make (the instances of an input
file, less what was made before) and a writer that shares requests and outlasts a buffer that is away for a while."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from pydantic import TypeAdapter, ValidationError

from agl_slime.buffer.models import Id
from agl_slime.buffer.stages import FAILED_REWARD, Item
from agl_slime.errors import AglSlimeError, BufferRequestError, ConfigError
from agl_slime.loop.tasks import read_tasks, shuffled
from agl_slime.support.backoff import Backoff
from agl_slime.support.batching import Batcher
from agl_slime.support.http import ask, is_transient, json_bytes

logger = logging.getLogger(__name__)

_MOST_ITEMS = 64
_MOST_BYTES = 4_000_000
_LONGEST_PAUSE_S = 10.0

Row = Mapping[str, Any]
_ID: TypeAdapter[Any] = TypeAdapter(Id)


class BufferUnreachableError(AglSlimeError, ConnectionError):
    """The buffer did not take an item within the time that was given to it."""


async def ask_buffer(
    url: str, path: str, body: Any = None, *, token: str | None = None, timeout_s: float = 90.0
) -> Any:
    """One request to the buffer at ``url``, a GET without ``body``; returns the answer's JSON.

    Raises what ``agl_slime.support.http.ask`` does."""
    headers = {"Authorization": f"Bearer {token}"} if token else None
    sent = None if body is None else json.dumps(body).encode()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s), headers=headers) as session:
        return await ask(session, url.rstrip("/") + path, sent)


class BufferWriter:
    """``await write(item)`` returns when the buffer has stored the item.

    Items that are written at the same time go in one request. What ``is_transient`` is tried again until ``give_up_s``
    have passed; an item's ``uid`` makes sure that a repeated request is stored once. An item that is refused (4xx) or
    has no form in JSON raises ``BufferRequestError``, and costs no other item.
    """

    def __init__(
        self, *, url: str, token: str | None = None, give_up_s: float = 600.0, request_timeout_s: float = 60.0
    ) -> None:
        self._url = url.rstrip("/") + "/buffer/write"
        self._headers = {"Prefer": "return=minimal"}
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
        item = item if item.get("uid") is not None else {**item, "uid": uuid.uuid4().hex}
        try:
            body = json_bytes(item)
        except (TypeError, ValueError) as error:  # numpy's numbers, objects, NaN beside an integer above 64 bit
            raise BufferRequestError(f"item {item['uid']!r} is no JSON: {error}") from error
        if b"null" in body and (place := next(_not_finite(item), None)):  # which orjson writes so
            raise BufferRequestError(f"item {item['uid']!r} is no JSON: {place}; only finite numbers can be written")
        await self._batches.add(body)

    async def _send(self, bodies: list[bytes]) -> list[BufferRequestError | None]:
        what = f"the buffer at {self._url} took nothing"
        backoff = Backoff(what, BufferUnreachableError, cap_s=_LONGEST_PAUSE_S, patience_s=self._give_up_s)
        try:
            await backoff.run(lambda: ask(self._session, self._url, b"[" + b",".join(bodies) + b"]"), is_transient)
        except aiohttp.ClientResponseError as error:
            if len(bodies) == 1:
                return [BufferRequestError(f"the buffer refused an item: {error.message}", status=error.status)]
            # a request is refused as a whole; one bad item must not cost the others
            return [result for body in bodies for result in await self._send([body])]
        return [None] * len(bodies)


def plan(rows: Sequence[Row], payload: Mapping[str, Any]) -> Iterator[tuple[Row, int]]:
    """``(row, epoch)`` for each item that a generator's ``payload`` asks for: each instance ``num_repeat_per_sample``
    times in each of ``num_epoch`` epochs, in an order that depends on the epoch only.

    An id in ``skip_instance_ids`` skips its instance once (one that is there twice skips two epochs).
    ``partial_groups`` are groups that the buffer holds in part, as ``{"instance_id", "group_id", "items"}`` with the
    epoch as group id: only what they miss is made.
    """
    repeat = int(payload["num_repeat_per_sample"])
    skip = Counter(orjson.dumps(instance_id) for instance_id in payload.get("skip_instance_ids") or ())
    partial = payload.get("partial_groups") or ()
    parts = {orjson.dumps([part["instance_id"], part.get("group_id")]): int(part["items"]) for part in partial}
    for epoch in range(int(payload.get("num_epoch", 1))):
        for row in shuffled(rows, f"0:{epoch}"):
            key = orjson.dumps(row["instance_id"])
            if skip[key] > 0:
                skip[key] -= 1
                continue
            for _ in range(repeat - parts.pop(orjson.dumps([row["instance_id"], epoch]), 0)):
                yield row, epoch


async def write_items(
    work: Iterable[tuple[Row, int]],
    make_item: Callable[[Row, int], Awaitable[Item]],
    *,
    url: str,
    token: str | None = None,
    limit: int,
) -> None:
    """Make an item for each ``(row, epoch)`` and write it to the buffer, ``limit`` at a time; the first exception ends
    the rest and is raised.

    A rollout counts as running until its item is stored, so that a full buffer holds the generator back. An item that
    the buffer refuses is written as a failed one: its group does not wait for it.
    """

    async def one(row: Row, epoch: int) -> None:
        item = await make_item(row, epoch)
        try:
            await writer.write(item)
        except BufferRequestError as error:
            logger.error("An item of %s was refused: %s", row["instance_id"], error)
            try:
                await writer.write(failed_item(row, epoch, f"its item was refused: {error}"))
            except BufferRequestError:
                logger.exception("Nor can it be written that the item failed.")

    running: set[asyncio.Task[None]] = set()
    async with BufferWriter(url=url, token=token) as writer:
        try:
            for row, epoch in work:
                running.add(asyncio.create_task(one(row, epoch)))
                if len(running) >= limit:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    await asyncio.gather(*done)
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()


def item_of(row: Row, epoch: int, uid: str, messages: Any, reward: float, extra_info: Item, **fields: Any) -> Item:
    """An item with the fields that every reader expects; ``fields`` stand beside them, the row's in ``extra_info``.
    What of a row or a message has no form in JSON is spelled out: NaN and infinities as text, half a character as
    backslash and number."""
    kept = {key: value for key, value in row.items() if key not in ("instance_id", "prompt", "messages")}
    named = {"uid": uid, "instance_id": row["instance_id"], "group_id": epoch, "messages": _spelled(messages)}
    return {**named, "reward": reward, "extra_info": {**_spelled(kept), **extra_info}, **fields}


def _spelled(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if isinstance(value, dict):
        return {_spelled(key): _spelled(one) for key, one in value.items()}
    return [*map(_spelled, value)] if isinstance(value, list) else value


def _not_finite(value: Any, place: str = "") -> Iterator[str]:
    """Where NaN or an infinity stands in an item."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{place} is {value}"
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, one in entries:
        if isinstance(one, (float, dict, list, tuple)):
            yield from _not_finite(one, f"{place}.{key}" if place else str(key))


def failed_item(row: Row, epoch: int, error: str, *, uid: str | None = None) -> Item:
    """What is written for a rollout that gave nothing: it says why, and is not trained on."""
    messages, told = _messages(row.get("prompt")) or [], error.encode(errors="replace").decode()
    return item_of(row, epoch, uid or uuid.uuid4().hex, messages, FAILED_REWARD, {"error": told})


def read_rows(path: Path, *, prompts: bool = True) -> list[dict[str, Any]]:
    """The instances of a JSON-lines file, each with an ``instance_id``, a text or an integer of 64 bit (the number of
    the row when missing).

    With ``prompts`` each needs a ``prompt``, chat messages or text, which is made chat messages. Raises ``ConfigError``
    naming a line that cannot be used.
    """
    read = read_tasks(path, flag="input_file", strings=False)
    rows = [{**row, "instance_id": _instance_of(row, number, path)} for number, row in enumerate(read)]
    for row in rows if prompts else ():
        messages = _messages(row.get("prompt"))
        if messages is None:
            given = repr(row.get("prompt"))[:80]
            raise ConfigError(f"{path}: prompt of {row['instance_id']!r} is {given}; expected chat messages or text")
        row["prompt"] = messages
    return rows


def _instance_of(row: Row, number: int, path: Path) -> Any:
    given = row.get("instance_id")
    if given is None:
        return number
    try:
        return _ID.validate_python(given if _spelled(given) == given else None)
    except ValidationError:
        fix = "give a text or an integer of 64 bit"
        raise ConfigError(f"{path}: the instance_id of row {number} is {given!r:.80}; {fix}") from None


def _messages(prompt: Any) -> list[dict[str, Any]] | None:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt) else None
