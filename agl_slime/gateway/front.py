"""The one public address of a gateway on several cores.

The front looks at the first line of a request, finds the worker from the attempt that the address names, and hands it
the open connection: it reads no body, moves no byte and holds nothing. Each connection carries one request, for the
next one on it might be another attempt's. What no worker is to answer, or can just now, passes through here.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, Self

from agl_slime.errors import ConfigError, GatewayRequestError
from agl_slime.gateway.anthropic import AnthropicMessages
from agl_slime.gateway.chat import ChatCompletions
from agl_slime.gateway.errors import RETRY_AFTER_S
from agl_slime.gateway.settings import endpoint_of
from agl_slime.support.handover import Given
from agl_slime.support.http import json_bytes, local_url
from agl_slime.support.net import is_loopback

logger = logging.getLogger(__name__)

_ATTEMPT = re.compile(rb"/rollout/([^/?\s]+)/attempt/([^/?\s]+)")
_HOST = re.compile(rb"\r\nhost:[^\r\n]*", re.IGNORECASE)
_CONNECTION = re.compile(rb"\r\n(?:connection|keep-alive):[^\r\n]*", re.IGNORECASE)
_BACKLOG = 1024
_HEAD_S, _HEAD_BYTES = 30.0, 64 * 1024
_START_S = 60.0  # a worker that has died is coming back
_LINE = 2048  # an address is shorter
_AGAIN_S = 0.2  # where this process may open no more files
_LINGER_S = 1.0
_PIECE = 64 * 1024

Elsewhere = Callable[[bytes], "int | None"]
"""The port, on this machine, of another server that answers what this line asks for; ``None``: a worker does."""


class Worker(Protocol):
    """A process that answers."""

    process: Any
    port: asyncio.Future[int]
    """Done while it listens."""

    def take(self, connection: socket.socket) -> Given:
        """Have it serve a connection. Raises ``OSError`` where it cannot just now."""
        ...


def names_attempt(path: bytes) -> bool:
    return _ATTEMPT.search(path) is not None


def worker_of(path: bytes, n: int) -> int:
    """The worker, from 0, of the attempt that ``path`` names; the first where it names none. Equal in every process."""
    found = _ATTEMPT.search(path)
    return zlib.crc32(b"/".join(found.groups())) % n if found is not None else 0


def listener(host: str, port: int) -> socket.socket:
    """Raises ``OSError`` where that address cannot be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listens = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    listens.setblocking(False)
    return listens


class Front:
    """The public address, within the block: ``url``, and what a ``ProxyLLM`` is to name, ``endpoint``. ``under_way``:
    requests that workers answer just now."""

    def __init__(
        self,
        workers: Sequence[Worker],
        listens: socket.socket,
        *,
        host: str,
        token: str | None,
        elsewhere: Elsewhere = lambda path: None,
    ) -> None:
        self._workers, self._listens, self._token, self._elsewhere = workers, listens, token, elsewhere
        self._local = is_loopback(host)
        self.url, self.under_way = local_url(host, listens.getsockname()[1]), 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._begin(self._accept())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._listens.close()

    def _begin(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @property
    def endpoint(self) -> str:
        return endpoint_of(self.url, self._token)

    def pids(self) -> list[int]:
        """Process ids of the workers, in their order."""
        return [worker.process.pid or 0 for worker in self._workers if worker.process is not None]

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listens)
            except OSError as error:  # of one that has gone again, or no file may be opened any more
                logger.debug("A connection was not accepted: %s", error)
                await asyncio.sleep(_AGAIN_S)
            else:
                self._begin(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, asyncio.TimeoutError, TimeoutError):  # nobody waits for the answer
            connection.setblocking(False)
            line = await _first_line(connection)
            given = self._given(line, connection)
            if given is None:
                await self._passed(connection)
                return
            self.under_way += 1
            try:
                await given.ended
            finally:
                self.under_way -= 1
            if given.lost:
                reader, writer = await _streams(connection)
                try:
                    await _lost(line, (reader, writer))
                finally:
                    writer.close()

    def _given(self, line: bytes, connection: socket.socket) -> Given | None:
        """``None`` where no worker is to answer, or the one that is cannot take it just now."""
        if not line.endswith(b"\n") or self._elsewhere(line) is not None:
            return None
        with suppress(OSError):
            return self._workers[worker_of(line, len(self._workers))].take(connection)
        return None

    # -- what passes through ------------------------------------------------------------------------------------------

    async def _passed(self, connection: socket.socket) -> None:
        reader, writer = await _streams(connection)
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_S)
            await self._forward(head, reader, writer)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # no request
        finally:
            writer.close()

    async def _forward(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = head.split(b"\r\n", 1)[0]
        if (port := self._elsewhere(line)) is not None:
            return await self._pass_on(head, port, reader, writer)
        worker = self._workers[worker_of(line, len(self._workers))]
        try:
            port = await asyncio.wait_for(asyncio.shield(worker.port), _START_S)
        except (ConfigError, TimeoutError):
            return await _lost(line, (reader, writer))
        self.under_way += 1
        try:
            await self._pass_on(head, port, reader, writer)
        finally:
            self.under_way -= 1

    async def _pass_on(
        self, head: bytes, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        line = head.split(b"\r\n", 1)[0]
        try:
            up, down = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return await _lost(line, (reader, writer))
        if not self._local:  # who is asked here by another name is behind it a server for this machine
            head = _HOST.sub(b"\r\nHost: 127.0.0.1", head, count=1)
        try:
            down.write(_CONNECTION.sub(b"", head[:-2]) + b"Connection: close\r\n\r\n")
            sending = asyncio.ensure_future(_move(reader, down))
            answering = asyncio.ensure_future(_move(up, writer))
            try:
                # the client sends nothing after its request: what ends first is the answer, or the client has gone
                await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
                if not reader.at_eof():  # the worker may have answered, and closed, before it had read the body
                    await answering
                if answering.done() and not answering.result():
                    await _lost(line, (reader, writer))
            finally:
                for task in (sending, answering):
                    task.cancel()
        finally:
            down.close()


async def _first_line(connection: socket.socket) -> bytes:
    """The first line of what was sent, which stays there; no whole line where the first packet has none. Raises
    ``TimeoutError`` where nothing comes."""
    try:
        seen = connection.recv(_LINE, socket.MSG_PEEK)
    except BlockingIOError:
        loop = asyncio.get_running_loop()
        came: asyncio.Future[None] = loop.create_future()
        loop.add_reader(connection, lambda: came.done() or came.set_result(None))
        try:
            await asyncio.wait_for(came, _HEAD_S)
        finally:
            loop.remove_reader(connection)
        seen = connection.recv(_LINE, socket.MSG_PEEK)
    line, end, _ = seen.partition(b"\n")
    return line + end


async def _streams(connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """They close it."""
    connection = socket.socket(fileno=connection.detach())
    return await asyncio.open_connection(sock=connection, limit=_HEAD_BYTES)


async def _move(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> int:
    """Bytes until ``source`` ends or either breaks; how many."""
    moved = 0
    with suppress(OSError):
        while piece := await source.read(_PIECE):
            target.write(piece)
            moved += len(piece)
            await target.drain()
    return moved


async def _lost(line: bytes, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    reader, writer = streams
    told = "the gateway's worker with this conversation has ended: ask again, or begin the rollout again"
    refusal = GatewayRequestError(told, status=503, code="gateway_worker_lost")
    protocol = AnthropicMessages() if b"/messages" in line else ChatCompletions()
    body = json_bytes(protocol.error(refusal))
    head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: {RETRY_AFTER_S}\r\n"
    writer.write(head.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()
    writer.write_eof()

    async def rest() -> None:
        while await reader.read(_PIECE):
            pass

    # closed with unread bytes of the request, the connection would be reset, and the answer with it
    await asyncio.wait_for(rest(), _LINGER_S)
