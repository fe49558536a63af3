"""A command inside, its output up to a limit, and connections that are passed on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from verifiers.v1.runtimes.base import RuntimeProcess
from verifiers.v1.runtimes.subprocess import read_stream


@dataclass
class Command:
    pid: int
    ended: asyncio.Future[int]


class BoxProcess(RuntimeProcess):
    def __init__(
        self,
        ask: Callable[..., Awaitable[Any]],
        stack: contextlib.AsyncExitStack,
        command: Command,
        stdin: asyncio.StreamWriter,
        out: asyncio.StreamReader,
        err: asyncio.StreamReader,
    ) -> None:
        self._ask, self._stack, self._command, self._stdin = ask, stack, command, stdin
        self.stdout, self.stderr = read_stream(out), read_stream(err)

    async def write(self, data: bytes) -> None:
        self._stdin.write(data)
        await self._stdin.drain()

    async def wait(self) -> int:
        return await asyncio.shield(self._command.ended)

    async def poll(self) -> int | None:
        ended = self._command.ended
        return ended.result() if ended.done() and not ended.exception() else (-9 if ended.done() else None)

    async def terminate(self) -> None:
        await self._signal(signal.SIGTERM)

    async def kill(self) -> None:
        await self._signal(signal.SIGKILL)
        await self._stack.aclose()

    async def _signal(self, number: int) -> None:
        if not self._command.ended.done():
            await self._ask("signal", pid=self._command.pid, signal=number)


async def bounded(stream: asyncio.StreamReader, limit: int | None) -> bytes:
    """All of it, or its beginning and end when it is more than `limit` bytes."""
    if limit is None:
        return await stream.read()
    head, tail, left_out = bytearray(), bytearray(), 0
    while chunk := await stream.read(2**16):
        room = max(0, limit // 2 - len(head))
        head += chunk[:room]
        tail += chunk[room:]
        over = len(tail) - (limit - limit // 2)
        if over > 0:
            left_out += over
            del tail[:over]
    return bytes(head) + (f"\n[{left_out} bytes left out]\n".encode() if left_out else b"") + bytes(tail)


async def pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    out_reader: asyncio.StreamReader,
    out_writer: asyncio.StreamWriter,
) -> None:
    async def one_way(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(2**16):
                target.write(data)
                await target.drain()
            if target.can_write_eof():
                target.write_eof()

    try:
        await asyncio.gather(one_way(reader, out_writer), one_way(out_reader, writer))
    finally:
        writer.close()
        out_writer.close()
