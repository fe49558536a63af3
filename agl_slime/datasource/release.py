"""Telling a store which rollouts have been read, so that it need not keep them.

A store in this process ends with it, so a rollout is released as soon as it has been read. A store elsewhere outlives
this process: when a saved state is loaded, what ended after it is read again. There a rollout is released by the second
save after it was read: the last two saved states can then both be gone back to. Without saving, it is released at once,
some at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from typing import Any

from agl_slime.store.bridge import BridgeStore

logger = logging.getLogger(__name__)

_BATCH = 256
_BATCH_S = 1.0


class Releaser:
    """Where the rollouts stand that a data source has read. Not thread-safe, except that ``saved`` may be called from
    another thread.

    ``saves``: whether states are saved that may be gone back to. Without a store, or with one that releases nothing, it
    does nothing.
    """

    def __init__(self, store: Any, *, saves: bool) -> None:
        self._at_once = isinstance(store, BridgeStore)
        self._saves = saves and not self._at_once
        self._release = getattr(store, "release", None)
        self._read: list[str] = []  # since the last save
        self._read_before: list[str] = []  # before it
        self._due: list[str] = []
        self._flushed = time.monotonic()

    async def read(self, rollout_id: str) -> None:
        """A rollout has been read and settled."""
        if self._release is None:
            return
        if self._at_once:
            await self._release([rollout_id])
            return
        (self._read if self._saves else self._due).append(rollout_id)
        if len(self._due) >= _BATCH or (self._due and time.monotonic() - self._flushed >= _BATCH_S):
            await self._flush()

    def saved(self, waiting: Collection[str]) -> None:
        """A state has been saved in which the rollouts ``waiting`` are still to be read again."""
        if self._saves:
            again = set(waiting)
            read, self._read = self._read, []
            self._due.extend(self._read_before)
            self._read_before = [rollout_id for rollout_id in read if rollout_id not in again]
            self._read.extend(rollout_id for rollout_id in read if rollout_id in again)

    async def _flush(self) -> None:
        due, self._due = self._due, []
        self._flushed = time.monotonic()
        try:
            assert self._release is not None
            await self._release(due)
        except Exception as error:  # the store keeps them: memory, not data, is at stake
            self._due = [*due, *self._due]
            logger.warning("%d rollouts could not be released in the store: %s", len(due), error)


__all__ = ["Releaser"]
