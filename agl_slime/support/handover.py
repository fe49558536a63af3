"""Connections that one process accepts and another serves: they travel as open sockets, and no byte of a request or its
answer passes through the first.

The giver keeps each one open too until the taker says that it has ended: what a taker that dies has not begun to answer
can still be answered.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count

_MESSAGE = struct.Struct("!QB")
_BEGUN, _ENDED = 1, 0


def channel() -> tuple[socket.socket, socket.socket]:
    """The giver's end and the taker's."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        end.setblocking(False)
    return ends


class Given:
    """A connection that another process serves: whether its answer has ``begun``, whether it has ``ended``, and whether
    it was ``lost`` before, with the taker."""

    def __init__(self) -> None:
        self.begun, self.lost = False, False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Giver:
    """The end that accepts, on the running loop, until ``close``."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self._numbers, self._rest = end, count(), b""
        self._given: dict[int, Given] = {}
        asyncio.get_running_loop().add_reader(end, self._hear)

    def give(self, connection: socket.socket) -> Given:
        """Have it served. Raises ``OSError`` where the taker has ended, ``BlockingIOError`` where it is far behind."""
        number, given = next(self._numbers), Given()
        socket.send_fds(self._end, [_MESSAGE.pack(number, _BEGUN)], [connection.fileno()])
        self._given[number] = given
        return given

    def close(self) -> None:
        """The taker has ended: so has all that it served. Safe to call twice."""
        if self._end.fileno() < 0:
            return
        self._hear()
        asyncio.get_running_loop().remove_reader(self._end)
        self._end.close()
        for given in self._given.values():
            given.lost = not given.begun
            _end(given)
        self._given.clear()

    def _hear(self) -> None:
        with suppress(OSError):  # nothing more is there, or nobody
            while heard := self._end.recv(_MESSAGE.size * 1024):
                heard = self._rest + heard
                whole = len(heard) // _MESSAGE.size * _MESSAGE.size
                self._rest = heard[whole:]
                for number, what in _MESSAGE.iter_unpack(heard[:whole]):
                    if what == _BEGUN:
                        self._given[number].begun = True
                    else:
                        _end(self._given.pop(number))
            asyncio.get_running_loop().remove_reader(self._end)  # it reads as ended for ever


def _end(given: Given) -> None:
    if not given.ended.done():
        given.ended.set_result(None)


class Taker:
    """The end that serves. ``check_host``: whether who asks must name this machine (``net.page_refusal``)."""

    def __init__(self, end: socket.socket, *, check_host: bool) -> None:
        self._end, self.check_host = end, check_host
        self._numbers: dict[asyncio.BaseTransport | None, int] = {}
        self._making: set[asyncio.Task[None]] = set()
        self._untold, self._waits = bytearray(), False

    def __contains__(self, transport: asyncio.BaseTransport | None) -> bool:
        return transport in self._numbers

    def start(self, server: Callable[[], asyncio.Protocol]) -> None:
        """Serve what comes with a protocol of ``server`` each, on the running loop."""
        asyncio.get_running_loop().add_reader(self._end, self._take, server)

    def stop(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._end)
        loop.remove_writer(self._end)
        self._waits = False
        self._end.close()

    def begins(self, transport: asyncio.BaseTransport | None) -> None:
        """The first byte of its answer is about to go out."""
        self._tell(self._numbers[transport], _BEGUN)

    def _take(self, server: Callable[[], asyncio.Protocol]) -> None:
        loop = asyncio.get_running_loop()
        with suppress(BlockingIOError):
            while True:
                message, [*sockets], *_ = socket.recv_fds(self._end, _MESSAGE.size, 1)
                if not message:  # the giver has ended
                    loop.remove_reader(self._end)
                    return
                number, _ = _MESSAGE.unpack(message)
                if not sockets:  # this process may open no more
                    self._tell(number, _ENDED)
                    continue
                task = loop.create_task(self._serve(socket.socket(fileno=sockets[0]), server, number))
                self._making.add(task)
                task.add_done_callback(self._making.discard)

    async def _serve(self, connection: socket.socket, server: Callable[[], asyncio.Protocol], number: int) -> None:
        connection.setblocking(False)
        try:
            served = partial(_Served, self, server, number)
            await asyncio.get_running_loop().connect_accepted_socket(served, connection)
        except OSError:  # its client has gone, and it was never one of the server's
            connection.close()
            if number not in self._numbers.values():
                self._tell(number, _ENDED)

    def _began(self, transport: asyncio.BaseTransport, number: int) -> None:
        self._numbers[transport] = number

    def _ended(self, transport: asyncio.BaseTransport | None) -> None:
        self._tell(self._numbers.pop(transport), _ENDED)

    def _tell(self, number: int, what: int) -> None:
        self._untold += _MESSAGE.pack(number, what)
        self._send()

    def _send(self) -> None:
        try:
            del self._untold[: self._end.send(self._untold)]
        except BlockingIOError:
            pass
        except OSError:  # the giver has ended, and with it what it kept
            self._untold.clear()
        loop = asyncio.get_running_loop()
        if self._untold and not self._waits:
            loop.add_writer(self._end, self._send)
        elif self._waits and not self._untold:
            loop.remove_writer(self._end)
        self._waits = bool(self._untold)


class _Served(asyncio.Protocol):
    """The server's own protocol, and who is told of the connection's end."""

    def __init__(self, taker: Taker, server: Callable[[], asyncio.Protocol], number: int) -> None:
        self._taker, self._inner, self._number = taker, server(), number
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._taker._began(transport, self._number)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)
        self._taker._ended(self._transport)
