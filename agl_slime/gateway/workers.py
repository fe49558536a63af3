"""A gateway on several cores: the conversations live in worker processes, each attempt in one, behind one address.

The front is in the process that starts the workers. It reads the head of a request, finds the worker from the attempt
that the address names, and then moves bytes: it parses no body and holds nothing. Each connection carries one request,
for the next one on it might be another attempt's. Where a worker dies its requests get one typed answer (503,
``gateway_worker_lost``); it is started again, and what it had answered of an attempt ends that attempt (410,
``attempt_lost``: see ``StoreGateway``), so that no conversation goes on with turns that nobody knows.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import re
import signal
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError, GatewayRequestError
from agl_slime.gateway.anthropic import AnthropicMessages
from agl_slime.gateway.chat import ChatCompletions
from agl_slime.gateway.errors import RETRY_AFTER_S
from agl_slime.gateway.remote import StoreGateway
from agl_slime.gateway.settings import GatewaySettings, endpoint_of
from agl_slime.rollout.access import EngineAccess
from agl_slime.store.client import WorkerStore
from agl_slime.store.server import served
from agl_slime.support.agl import LLM, LightningStore
from agl_slime.support.backoff import Backoff
from agl_slime.support.http import json_bytes
from agl_slime.support.net import is_loopback, require_token
from agl_slime.support.threads import LoopThread

logger = logging.getLogger(__name__)

_ATTEMPT = re.compile(rb"/rollout/([^/?\s]+)/attempt/([^/?\s]+)")
_HOST = re.compile(rb"\r\nhost:[^\r\n]*", re.IGNORECASE)
_CONNECTION = re.compile(rb"\r\n(?:connection|keep-alive):[^\r\n]*", re.IGNORECASE)
PROCESS_NAME = "agl-slime-gw"  # of workers that listen
_HEAD_S, _HEAD_BYTES = 30.0, 64 * 1024
_START_S = 60.0  # a worker imports for 5 s, more where cores are short
_STOP_S = 7.0  # a gateway takes 5 s at most
_PIECE = 64 * 1024
_BETWEEN_SPANS_S = 0.002  # an answer waits for its span


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker is made of; it travels to its process by pickle."""

    store_url: str
    store_token: str | None
    llm: LLM | None
    token: str | None
    settings: GatewaySettings
    access: EngineAccess | None = None
    make: Callable[..., StoreGateway] = StoreGateway
    """Takes what ``StoreGateway`` takes."""


def names_attempt(path: bytes) -> bool:
    return _ATTEMPT.search(path) is not None


def worker_of(path: bytes, n: int) -> int:
    """The worker, from 0, of the attempt that ``path`` names; the first where it names none. Equal in every process."""
    found = _ATTEMPT.search(path)
    return zlib.crc32(b"/".join(found.groups())) % n if found is not None else 0


def worker_main(spec: WorkerSpec, control: Connection) -> None:
    """The main function of a worker process: serve until the other end of ``control`` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the front decides
    store = WorkerStore(spec.store_url, token=spec.store_token, between_s=_BETWEEN_SPANS_S)
    more: dict[str, Any] = {"token": spec.token, "settings": spec.settings, "access": spec.access}
    with spec.make(store=store, llm=spec.llm, **more) as gateway:
        with suppress(OSError):  # its name in ps and top, where there is a /proc
            Path("/proc/self/comm").write_text(PROCESS_NAME)
        control.send(int(gateway.url.rpartition(":")[2]))
        with suppress(EOFError, OSError):
            control.recv()
    asyncio.run(store.close())


class _Worker:
    """One of them, started again whenever it ends."""

    def __init__(self, spec: WorkerSpec, name: str) -> None:
        self._spec, self._name = spec, name
        self.process: BaseProcess | None = None
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises ``ConfigError`` where the worker ends before it listens."""
        self._watching = asyncio.create_task(self._watch())
        await asyncio.wait({self.port, self._watching}, timeout=_START_S, return_when=asyncio.FIRST_COMPLETED)
        if not self.port.done():
            raise ConfigError(f"{self._name} did not start within {_START_S:g} s; what it printed says why")
        self.port.result()

    async def stop(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})

    async def _watch(self) -> None:
        backoff, up = Backoff(base_s=0.5, cap_s=15.0, tries=5), False
        while True:
            try:
                code = await self._live()
            except _NotUpError as error:
                # one that never was up would end in the same way again
                if not up or (pause := backoff.failed(error)) is None:
                    self.port.set_exception(ConfigError(f"{self._name} {error}; what it printed says why"))
                    self.port.exception()  # it is told to whoever asks
                    return
                await asyncio.sleep(pause)
            else:
                up = True
                backoff.reset()
                logger.warning("%s ended (exit code %s) and is started again.", self._name, code)

    async def _live(self) -> int | None:
        """From start to end; the exit code. Raises ``_NotUpError`` where it never listened."""
        loop, context = asyncio.get_running_loop(), multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=worker_main, args=(self._spec, theirs), name=self._name, daemon=True)
        process.start()
        self.process = process
        theirs.close()
        ended, told = asyncio.Event(), asyncio.Event()
        loop.add_reader(process.sentinel, ended.set)
        loop.add_reader(ours.fileno(), told.set)
        try:
            await told.wait()  # a port, or the end of it
            loop.remove_reader(ours.fileno())
            try:
                port = ours.recv()
            except (EOFError, OSError) as error:
                process.join()
                raise _NotUpError(f"ended with exit code {process.exitcode} before it listened") from error
            self.port.set_result(port)
            await ended.wait()
            self.port = loop.create_future()
            process.join()
            return process.exitcode
        finally:
            loop.remove_reader(ours.fileno())
            ours.close()  # which ends it, where it lives
            try:
                await asyncio.wait_for(ended.wait(), _STOP_S)
            except (asyncio.TimeoutError, TimeoutError):
                process.kill()
                await ended.wait()
            loop.remove_reader(process.sentinel)
            process.join()


class _NotUpError(Exception):
    pass


Elsewhere = Callable[[bytes], "int | None"]
"""The port, on this machine, of another server that answers what this line asks for; ``None``: a worker does."""


class Front:
    """The public address: ``url``, and what a ``ProxyLLM`` is to name, ``endpoint``. ``under_way``: requests that
    workers answer just now."""

    def __init__(self, workers: list[_Worker], *, host: str, token: str | None, elsewhere: Elsewhere) -> None:
        self._workers, self._token, self._elsewhere = workers, token, elsewhere
        self._local = is_loopback(host)
        self.url, self.under_way = "", 0

    @property
    def endpoint(self) -> str:
        return endpoint_of(self.url, self._token)

    def pids(self) -> list[int]:
        """Process ids of the workers, in their order."""
        return [worker.process.pid or 0 for worker in self._workers if worker.process is not None]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _HEAD_S)
            await self._forward(head, reader, writer)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.TimeoutError, TimeoutError, OSError):
            pass  # no request, or nobody who waits for the answer
        finally:
            writer.close()

    async def _forward(self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = head.split(b"\r\n", 1)[0]
        if (port := self._elsewhere(path)) is not None:
            return await self._pass_on(head, port, reader, writer)
        worker = self._workers[worker_of(path, len(self._workers))]
        try:
            # one that has died is coming back
            port = await asyncio.wait_for(asyncio.shield(worker.port), _START_S)
        except (ConfigError, asyncio.TimeoutError, TimeoutError):
            return await _lost(path, writer)
        self.under_way += 1
        try:
            await self._pass_on(head, port, reader, writer)
        finally:
            self.under_way -= 1

    async def _pass_on(
        self, head: bytes, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        path = head.split(b"\r\n", 1)[0]
        try:
            up, down = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return await _lost(path, writer)
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
                    await _lost(path, writer)
            finally:
                for task in (sending, answering):
                    task.cancel()
        finally:
            down.close()


async def _move(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> int:
    """Bytes until ``source`` ends or either breaks; how many."""
    moved = 0
    with suppress(OSError):
        while piece := await source.read(_PIECE):
            target.write(piece)
            moved += len(piece)
            await target.drain()
    return moved


async def _lost(path: bytes, writer: asyncio.StreamWriter) -> None:
    told = "the gateway's worker with this conversation has ended: ask again, or begin the rollout again"
    refusal = GatewayRequestError(told, status=503, code="gateway_worker_lost")
    protocol = AnthropicMessages() if b"/messages" in path else ChatCompletions()
    body = json_bytes(protocol.error(refusal))
    head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: {RETRY_AFTER_S}\r\n"
    writer.write(head.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await writer.drain()


@asynccontextmanager
async def serving_workers(
    spec: WorkerSpec, n: int, *, elsewhere: Elsewhere = lambda path: None
) -> AsyncIterator[Front]:
    """``n`` workers and the front before them, on ``spec.settings``' host and port, within the block. Raises
    ``ConfigError`` where the address cannot be listened on, or a worker does not start."""
    host, port = spec.settings.host, spec.settings.port
    require_token(host, spec.token, setting="AGL_SLIME_GATEWAY_TOKEN")
    inside = replace(spec, settings=replace(spec.settings, host="127.0.0.1", port=0))
    workers = [_Worker(inside, f"gateway worker {number}") for number in range(n)]
    front = Front(workers, host=host, token=spec.token, elsewhere=elsewhere)
    try:
        server: Any = await asyncio.start_server(front.serve, host, port, limit=_HEAD_BYTES, backlog=1024)
    except OSError as error:
        raise ConfigError(f"the gateway cannot listen on {host}:{port}: {error}") from error
    async with server:
        bound = server.sockets[0].getsockname()[1]
        front.url = f"http://{'127.0.0.1' if host in ('', '0.0.0.0') else host}:{bound}"
        try:
            await asyncio.gather(*(worker.start() for worker in workers))
            yield front
        finally:
            await asyncio.gather(*(worker.stop() for worker in workers))


@contextmanager
def workers_beside(
    store: LightningStore,
    *,
    llm: LLM | None,
    token: str | None,
    settings: GatewaySettings,
    n: int,
    make: Callable[..., StoreGateway] = StoreGateway,
    elsewhere: Elsewhere = lambda path: None,
) -> Iterator[Front]:
    """As ``serving_workers``, for a store of this process or the client of one; the front is on a thread of its own."""
    with ExitStack() as stack:
        url, store_token = stack.enter_context(served(store))
        spec = WorkerSpec(store_url=url, store_token=store_token, llm=llm, token=token, settings=settings, make=make)
        fronts: list[Front] = []
        ended: asyncio.Event | None = None

        async def serve(ready: Callable[[], None]) -> None:
            nonlocal ended
            ended = asyncio.Event()
            async with serving_workers(spec, n, elsewhere=elsewhere) as front:
                fronts.append(front)
                ready()
                await ended.wait()

        thread = LoopThread(serve, name="agl-slime-gateway-front")
        try:
            thread.start()
            if thread.failure is not None:
                raise thread.failure
            yield fronts[0]
        finally:
            if ended is not None:
                thread.call(ended.set)
            thread.join(_START_S)
