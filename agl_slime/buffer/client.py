"""Client of the Rollout Buffer: single requests, and for generators the plan of missing items and a writer that batches
requests and retries while the buffer is unavailable."""

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
from agl_slime.support.http import is_transient, json_bytes, request_json
from agl_slime.support.net import shown_url

logger = logging.getLogger(__name__)

_MOST_ITEMS = 64
_MOST_BYTES = 4_000_000
_LONGEST_PAUSE_S = 10.0
_REQUEST_TIMEOUT_S = 60.0

Row = Mapping[str, Any]
_ID: TypeAdapter[Any] = TypeAdapter(Id)


class BufferUnreachableError(AglSlimeError, ConnectionError):
    """The buffer did not store an item in time."""


async def ask_buffer(
    url: str, path: str, body: Any = None, *, token: str | None = None, timeout_s: float = 90.0
) -> Any:
    """The JSON answer to one request to the buffer at ``url``: a POST, or a GET without ``body``. Raises as
    ``agl_slime.support.http.request_json`` does."""
    headers = {"Authorization": f"Bearer {token}"} if token else None
    payload = None if body is None else json.dumps(body).encode()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s), headers=headers) as session:
        return await request_json(session, url.rstrip("/") + path, payload)


class BufferWriter:
    """Writes items to a buffer: ``await write(item)`` returns when the item is stored.

    Concurrent writes share a request. Transient errors are retried for ``give_up_s``; by its ``uid`` a repeated item is
    stored once. An item that is refused (4xx) or not JSON raises ``BufferRequestError`` without effect on other items.
    """

    def __init__(self, *, url: str, give_up_s: float = 600.0) -> None:
        self._url, self._give_up_s = url.rstrip("/") + "/buffer/write", give_up_s
        # one request is built while the other is answered
        self._batches = Batcher(self._send, most=_MOST_ITEMS, parallel=2, size=len, most_size=_MOST_BYTES)

    async def __aenter__(self) -> BufferWriter:
        timeout = aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S)
        self._session = aiohttp.ClientSession(headers={"Prefer": "return=minimal"}, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._batches.close(cancel=True)
        await self._session.close()

    async def write(self, item: Item) -> None:
        """Store one item. An item without ``uid`` gets one, for retries."""
        item = item if item.get("uid") is not None else {**item, "uid": uuid.uuid4().hex}
        try:
            body = json_bytes(item)
        except (TypeError, ValueError) as error:  # numpy numbers, objects, NaN beside an integer above 64 bit
            raise BufferRequestError(f"item {item['uid']!r} is not JSON: {error}") from error
        if b"null" in body and (place := next(_not_finite(item), None)):  # orjson writes NaN as null
            raise BufferRequestError(f"item {item['uid']!r} is not JSON: {place}; only finite numbers can be written")
        await self._batches.add(body)

    async def _send(self, bodies: list[bytes]) -> list[BufferRequestError | None]:
        failure = f"the buffer at {shown_url(self._url)} stored no item"
        backoff = Backoff(failure, BufferUnreachableError, cap_s=_LONGEST_PAUSE_S, patience_s=self._give_up_s)
        body = b"[" + b",".join(bodies) + b"]"
        try:
            await backoff.run(lambda: request_json(self._session, self._url, body), is_transient)
        except aiohttp.ClientResponseError as error:
            if len(bodies) == 1:
                return [BufferRequestError(f"the buffer refused an item: {error.message}", status=error.status)]
            # the whole request was refused: send the items one by one
            return [result for body in bodies for result in await self._send([body])]
        return [None] * len(bodies)


def plan(rows: Sequence[Row], payload: Mapping[str, Any]) -> Iterator[tuple[Row, int, int]]:
    """``(row, epoch, member of the group)`` for each item that a generator's ``payload`` requests: each instance
    ``num_repeat_per_sample`` times in each of ``num_epoch`` epochs, in an order that depends only on the epoch.

    An id in ``skip_instance_ids`` skips its instance once (given twice, it skips two epochs). ``partial_groups`` are
    incomplete groups in the buffer, as ``{"instance_id", "group_id", "items"}`` with the epoch as group id: only their
    missing items are planned.
    """
    repeat = int(payload["num_repeat_per_sample"])
    skip = Counter(orjson.dumps(instance_id) for instance_id in payload.get("skip_instance_ids") or ())
    groups = payload.get("partial_groups") or ()
    stored = {orjson.dumps([group["instance_id"], group.get("group_id")]): int(group["items"]) for group in groups}
    for epoch in range(int(payload.get("num_epoch", 1))):
        for row in shuffled(rows, f"0:{epoch}"):
            key = orjson.dumps(row["instance_id"])
            if skip[key] > 0:
                skip[key] -= 1
                continue
            for member in range(stored.pop(orjson.dumps([row["instance_id"], epoch]), 0), repeat):
                yield row, epoch, member


async def write_items(
    planned: Iterable[tuple[Row, int, int]],
    make_item: Callable[[Row, int, int], Awaitable[Item]],
    *,
    url: str,
    limit: int,
) -> None:
    """Make an item for each ``(row, epoch, member)`` and write it to the buffer, ``limit`` at a time; the first
    exception cancels the rest and is raised.

    A rollout occupies its place until its item is stored: backpressure from a full buffer. An item that the buffer
    refuses is written as a failed one, so that its group need not wait for it.
    """

    async def make_and_write(row: Row, epoch: int, member: int) -> None:
        item = await make_item(row, epoch, member)
        try:
            await writer.write(item)
        except BufferRequestError as error:
            logger.error("An item of %s was refused: %s", row["instance_id"], error)
            try:
                await writer.write(failed_item(row, epoch, f"its item was refused: {error}"))
            except BufferRequestError:
                logger.exception("The failed item was refused, too.")

    running: set[asyncio.Task[None]] = set()
    async with BufferWriter(url=url) as writer:
        try:
            for row, epoch, member in planned:
                running.add(asyncio.create_task(make_and_write(row, epoch, member)))
                if len(running) >= limit:
                    done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    await asyncio.gather(*done)
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()


def item_of(row: Row, epoch: int, uid: str, messages: Any, reward: float, extra_info: Item, **fields: Any) -> Item:
    """An item with the fields that every reader expects, and ``fields``; further fields of the row are in
    ``extra_info``. Values of rows and messages that JSON lacks become text: NaN, infinities, lone surrogates."""
    extra = {key: value for key, value in row.items() if key not in ("instance_id", "prompt", "messages")}
    required = {"uid": uid, "instance_id": row["instance_id"], "group_id": epoch, "messages": _json_safe(messages)}
    return {**required, "reward": reward, "extra_info": {**_json_safe(extra), **extra_info}, **fields}


def _json_safe(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if isinstance(value, dict):
        return {_json_safe(key): _json_safe(entry) for key, entry in value.items()}
    return [*map(_json_safe, value)] if isinstance(value, list) else value


def _not_finite(value: Any, place: str = "") -> Iterator[str]:
    """The places of NaN and infinities in an item, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{place} is {value}"
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, entry in entries:
        if isinstance(entry, (float, dict, list, tuple)):
            yield from _not_finite(entry, f"{place}.{key}" if place else str(key))


def failed_item(row: Row, epoch: int, error: str, *, uid: str | None = None) -> Item:
    """The item of a failed rollout, with its error; it is not trained on."""
    messages, text = _messages(row.get("prompt")) or [], error.encode(errors="replace").decode()
    return item_of(row, epoch, uid or uuid.uuid4().hex, messages, FAILED_REWARD, {"error": text})


def read_rows(path: Path, *, prompts: bool = True) -> list[dict[str, Any]]:
    """The instances of a JSON-lines file, each with an ``instance_id``: text or a 64-bit integer, by default the number
    of the row.

    With ``prompts`` each row needs a ``prompt``, chat messages or text, which becomes a chat message. Raises
    ``ConfigError`` naming an invalid line.
    """
    tasks = read_tasks(path, flag="input_file", strings=False)
    rows = [{**row, "instance_id": _instance_of(row, number, path)} for number, row in enumerate(tasks)]
    for row in rows if prompts else ():
        messages = _messages(row.get("prompt"))
        if messages is None:
            value = repr(row.get("prompt"))[:80]
            raise ConfigError(f"{path}: prompt of {row['instance_id']!r} is {value}; expected chat messages or text")
        row["prompt"] = messages
    return rows


def _instance_of(row: Row, number: int, path: Path) -> Any:
    value = row.get("instance_id")
    if value is None:
        return number
    try:
        return _ID.validate_python(value if _json_safe(value) == value else None)
    except ValidationError:
        fix = "give a text or a 64-bit integer"
        raise ConfigError(f"{path}: the instance_id of row {number} is {value!r:.80}; {fix}") from None


def _messages(prompt: Any) -> list[dict[str, Any]] | None:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt) else None
