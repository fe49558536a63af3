"""What a generator has to make and how it is written: the instances of an input file, epoch by epoch, less what was
made before."""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from agl_slime.buffer.client import BufferWriter, item_of
from agl_slime.buffer.errors import BufferRequestError
from agl_slime.buffer.stages import Item
from agl_slime.errors import ConfigError
from agl_slime.loop.tasks import read_tasks

logger = logging.getLogger(__name__)

# The reward of a rollout that failed; its ``extra_info["error"]`` is what leaves it out of training.
FAILED_REWARD = -1.0

Row = Mapping[str, Any]


def plan(
    rows: Sequence[Row],
    *,
    num_epoch: int,
    num_repeat_per_sample: int,
    skip_instance_ids: Iterable[Any] | None = None,
    partial_groups: Iterable[Mapping[str, Any]] | None = None,
    seed: int = 0,
) -> Iterator[tuple[Row, int]]:
    """``(row, epoch)`` for each item to make: each instance ``num_repeat_per_sample`` times per epoch, in an order that
    depends on the seed and the epoch only.

    An id in ``skip_instance_ids`` skips its instance once (one that is there twice skips two epochs).
    ``partial_groups`` are groups that the buffer holds in part, as ``{"instance_id", "group_id", "items"}`` with the
    epoch as group id: only what they miss is made.
    """
    skip = Counter(_key(instance_id) for instance_id in skip_instance_ids or ())
    parts = {_key([part["instance_id"], part.get("group_id")]): int(part["items"]) for part in partial_groups or ()}
    for epoch in range(num_epoch):
        order = list(rows)
        random.Random(f"{seed}:{epoch}").shuffle(order)
        for row in order:
            key = _key(row["instance_id"])
            if skip[key] > 0:
                skip[key] -= 1
                continue
            for _ in range(num_repeat_per_sample - parts.pop(_key([row["instance_id"], epoch]), 0)):
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
                    for task in done:
                        task.result()
            await asyncio.gather(*running)
        finally:
            for task in running:
                task.cancel()


def failed_item(row: Row, epoch: int, error: str, *, uid: str | None = None) -> Item:
    """What is written for a rollout that gave nothing: it says why, and is not trained on."""
    return item_of(
        uid=uid or uuid.uuid4().hex,
        instance_id=row["instance_id"],
        group_id=epoch,
        messages=_messages(row.get("prompt")) or [],
        reward=FAILED_REWARD,
        extra_info={**extra_of(row), "error": error.encode(errors="replace").decode()},
    )


def extra_of(row: Row) -> dict[str, Any]:
    """The fields of a row that its items keep."""
    return {key: value for key, value in row.items() if key not in ("instance_id", "prompt", "messages")}


def read_rows(path: Path, *, prompts: bool = True) -> list[dict[str, Any]]:
    """The instances of a JSON-lines file, each with an ``instance_id`` (the number of the row when missing).

    With ``prompts`` each needs a ``prompt``, chat messages or text, which is made chat messages. Raises ``ConfigError``
    naming a line that cannot be used.
    """
    rows = [{"instance_id": number, **row} for number, row in enumerate(read_tasks(path, flag="input_file"))]
    for row in rows if prompts else ():
        messages = _messages(row.get("prompt"))
        if messages is None:
            given = repr(row.get("prompt"))[:80]
            raise ConfigError(f"{path}: prompt of {row['instance_id']!r} is {given}; expected chat messages or text")
        row["prompt"] = messages
    return rows


def _messages(prompt: Any) -> list[dict[str, Any]] | None:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt if isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt) else None


def _key(value: Any) -> bytes:
    return orjson.dumps(value)
