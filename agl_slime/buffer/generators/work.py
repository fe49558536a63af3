"""What a generator has to make: the instances of an input file, epoch by epoch, less what was made before."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from agl_slime.errors import ConfigError

# The reward that marks a rollout that failed; the default filter leaves it out.
FAILED_REWARD = -1.0


class WorkPlan:
    """Each instance ``num_repeat_per_sample`` times per epoch.

    An id in ``skip_instance_ids`` skips its instance once (one that is there twice skips two epochs).
    ``partial_groups`` are groups that the buffer holds in part, as ``{"instance_id", "group_id", "items"}`` with the
    epoch as group id: only what they miss is made.
    """

    def __init__(
        self,
        *,
        num_repeat_per_sample: int,
        skip_instance_ids: Iterable[Any] = (),
        partial_groups: Iterable[Mapping[str, Any]] = (),
        seed: int = 0,
    ) -> None:
        self._repeats = num_repeat_per_sample
        self._skip = Counter(_key(instance_id) for instance_id in skip_instance_ids)
        self._partial = {
            _key([group["instance_id"], group.get("group_id")]): int(group["items"]) for group in partial_groups
        }
        self._seed = seed

    def of(self, rows: Sequence[dict[str, Any]], num_epoch: int) -> Iterator[tuple[dict[str, Any], int]]:
        """``(row, epoch)`` for each item to make, in an order that depends on the seed and the epoch only."""
        for epoch in range(num_epoch):
            order = list(rows)
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
            for row in order:
                key = _key(row["instance_id"])
                if self._skip[key] > 0:
                    self._skip[key] -= 1
                    continue
                there = self._partial.pop(_key([row["instance_id"], epoch]), 0)
                for _ in range(self._repeats - there):
                    yield row, epoch


async def run_bounded(rollouts: Iterable[Coroutine[Any, Any, None]], *, limit: int) -> None:
    """Run them all, ``limit`` at a time; the first exception ends the rest and is raised."""
    running: set[asyncio.Task[None]] = set()
    try:
        for rollout in rollouts:
            running.add(asyncio.create_task(rollout))
            if len(running) >= limit:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Instances from a JSON-lines file: ``prompt`` (chat messages or text) and ``instance_id`` (the number of the line
    when missing)."""
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().splitlines()):
        if not line.strip():
            continue
        row = orjson.loads(line)
        prompt = row.get("prompt")
        if isinstance(prompt, str):
            row["prompt"] = [{"role": "user", "content": prompt}]
        elif not isinstance(prompt, list):
            raise ConfigError(
                f"{path}, line {number + 1}: prompt is of type {type(prompt).__name__}; expected chat messages or text"
            )
        row.setdefault("instance_id", number)
        rows.append(row)
    return rows


def _key(value: Any) -> bytes:
    return orjson.dumps(value)
