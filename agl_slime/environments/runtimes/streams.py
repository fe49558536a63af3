"""Commands in a sandbox, their output up to a limit, and forwarded connections."""

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


class Output:
    """A command's output: all of it, or beginning and end if it is longer than ``limit`` bytes."""

    def __init__(self, stream: asyncio.StreamReader, limit: int | None) -> None:
        self._stream, self._limit = stream, limit
        self._head, self._tail, self._left_out = bytearray(), bytearray(), 0
        self.received = 0
        """Bytes received."""
        self._keeping = True

    async def read(self) -> None:
        """Read to the end."""
        while chunk := await self._stream.read(2**16):
            self.received += len(chunk)
            if self._keeping:
                self._keep(chunk)

    def _keep(self, chunk: bytes) -> None:
        if self._limit is None:
            self._head += chunk
            return
        free = max(0, self._limit // 2 - len(self._head))
        self._head += chunk[:free]
        self._tail += chunk[free:]
        excess = len(self._tail) - (self._limit - self._limit // 2)
        if excess > 0:
            self._left_out += excess
            del self._tail[:excess]

    def take(self) -> bytes:
        """The output so far. Later output is read and dropped."""
        self._keeping = False
        cut = f"\n[{self._left_out} bytes left out]\n".encode() if self._left_out else b""
        return bytes(self._head) + cut + bytes(self._tail)


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
