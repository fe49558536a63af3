"""A gateway on several cores: the conversations live in worker processes, each attempt in one, behind one address.

The front (``gateway.front``) is in the process that starts the workers. Where a worker dies its requests get one typed
answer (503, ``gateway_worker_lost``); it is started again, and what it had answered of an attempt ends that attempt
(410, ``attempt_lost``: see ``StoreGateway``), so that no conversation goes on with turns that nobody knows.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError
from agl_slime.gateway.front import Elsewhere, Front, listener
from agl_slime.gateway.remote import StoreGateway
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.rollout.access import EngineAccess
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import WorkerStore
from agl_slime.store.pipe import StorePipe, answer_calls
from agl_slime.store.server import served
from agl_slime.support.agl import LLM, LightningStore
from agl_slime.support.backoff import Backoff
from agl_slime.support.handover import Given, Giver, Taker, channel
from agl_slime.support.net import is_loopback, require_token
from agl_slime.support.threads import LoopThread

logger = logging.getLogger(__name__)

PROCESS_NAME = "agl-slime-gw"  # of workers that listen
_START_S = 60.0  # a worker imports for 5 s, more where cores are short
_STOP_S = 7.0  # a gateway takes 5 s at most
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
    local: bool = True
    """Whether the public address is for this machine only."""
    make: Callable[..., StoreGateway] = StoreGateway
    """Takes what ``StoreGateway`` takes."""


def worker_main(spec: WorkerSpec, control: Connection, taken: socket.socket, calls: socket.socket | None) -> None:
    """The main function of a worker process: serve until the other end of ``control`` is closed; ``taken`` brings
    connections of the front's, over ``calls`` its store is asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the front decides
    pipe, between_s = (None, _BETWEEN_SPANS_S) if calls is None else (StorePipe(calls), 0.0)
    store = WorkerStore(spec.store_url, token=spec.store_token, between_s=between_s, pipe=pipe)
    more: dict[str, Any] = {"token": spec.token, "settings": spec.settings, "access": spec.access}
    gateway = spec.make(store=store, llm=spec.llm, **more)
    gateway.taker = Taker(taken, check_host=spec.local)
    with gateway:
        with suppress(OSError):  # its name in ps and top, where there is a /proc
            Path("/proc/self/comm").write_text(PROCESS_NAME)
        control.send(int(gateway.url.rpartition(":")[2]))
        with suppress(EOFError, OSError):
            control.recv()
    asyncio.run(store.close())


class _Worker:
    """One of them, started again whenever it ends."""

    def __init__(self, spec: WorkerSpec, name: str, store: BridgeStore | None) -> None:
        self._spec, self._name, self._store = spec, name, store
        self.process: BaseProcess | None = None
        self._giver: Giver | None = None
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watching: asyncio.Task[None] | None = None

    def take(self, connection: socket.socket) -> Given:
        """Have it serve a connection. Raises ``OSError`` where it cannot just now."""
        if self._giver is None or not self.port.done():
            raise BlockingIOError("it does not listen")
        return self._giver.give(connection)

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
        given, taken = channel()
        asked, calls = channel() if self._store is not None else (None, None)
        args = (self._spec, theirs, taken, calls)
        process = context.Process(target=worker_main, args=args, name=self._name, daemon=True)
        process.start()
        self.process = process
        for end in (theirs, taken, calls):
            if end is not None:
                end.close()
        self._giver = giver = Giver(given)
        answering = None
        if self._store is not None and asked is not None:
            answering = asyncio.create_task(answer_calls(self._store, asked))
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
            except TimeoutError:
                process.kill()
                await ended.wait()
            loop.remove_reader(process.sentinel)
            process.join()
            giver.close()
            if answering is not None:  # what it has sent is written
                await asyncio.wait({answering})


class _NotUpError(Exception):
    pass


@asynccontextmanager
async def serving_workers(
    spec: WorkerSpec, n: int, *, store: BridgeStore | None = None, elsewhere: Elsewhere = lambda path: None
) -> AsyncIterator[Front]:
    """``n`` workers and the front before them, on ``spec.settings``' host and port, within the block; ``store`` is the
    one that they write to, where it is this process's. Raises ``ConfigError`` where the address cannot be listened on,
    or a worker does not start."""
    host, port = spec.settings.host, spec.settings.port
    require_token(host, spec.token, setting="AGL_SLIME_GATEWAY_TOKEN")
    settings = replace(spec.settings, host="127.0.0.1", port=0)
    inside = replace(spec, settings=settings, local=is_loopback(host))
    workers = [_Worker(inside, f"gateway worker {number}", store) for number in range(n)]
    try:
        listens = listener(host, port)
    except OSError as error:
        raise ConfigError(f"the gateway cannot listen on {host}:{port}: {error}") from error
    async with Front(workers, listens, host=host, token=spec.token, elsewhere=elsewhere) as front:
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
        own = store if isinstance(store, BridgeStore) else None
        fronts: list[Front] = []
        ended: asyncio.Event | None = None

        async def serve(ready: Callable[[], None]) -> None:
            nonlocal ended
            ended = asyncio.Event()
            async with serving_workers(spec, n, store=own, elsewhere=elsewhere) as front:
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
