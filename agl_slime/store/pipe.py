"""Calls of a worker process to the store of the process that started it, over a pair of sockets.

The bodies are those of ``StoreService``'s batches. The way over HTTP takes the store's process 1.2 ms for each request,
ten times what the call in it takes, and the worker as much again.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from typing import Any

import orjson

from agl_slime.errors import DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.server import execute_batch

_LENGTH = struct.Struct("!I")
_LIMIT = 1024 * 1024  # bytes read ahead


class StorePipe:
    """The worker's end, for one event loop. Asks one after the other."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._lock = end, asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: bytes) -> Any:
        """What the store answers to a batch. Raises ``DataSourceError`` where it has gone."""
        # to its end, whatever becomes of the caller: the answer that was not read would be the next caller's
        return await asyncio.shield(self._ask(body))

    async def _ask(self, body: bytes) -> Any:
        try:
            async with self._lock:
                if self._streams is None:
                    self._streams = await asyncio.open_connection(sock=self._end, limit=_LIMIT)
                reader, writer = self._streams
                return orjson.loads(await _exchange(reader, writer, body))
        except (OSError, asyncio.IncompleteReadError) as error:
            raise DataSourceError("the process that holds the store has ended") from error


async def answer_calls(store: BridgeStore, end: socket.socket) -> None:
    """Execute what comes over the store's ``end`` until the other one is closed."""
    reader, writer = await asyncio.open_connection(sock=end, limit=_LIMIT)
    with suppress(OSError, asyncio.IncompleteReadError):
        try:
            body = await _read(reader)
            while True:
                body = await _exchange(reader, writer, await execute_batch(store, orjson.loads(body)))
        finally:
            writer.close()


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> bytes:
    writer.write(_LENGTH.pack(len(body)) + body)
    await writer.drain()
    return await _read(reader)


async def _read(reader: asyncio.StreamReader) -> bytes:
    [length] = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)
