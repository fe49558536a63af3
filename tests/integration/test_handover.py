"""Connections that one process accepts and another serves; calls to a store over a pair of sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from agl_slime.errors import DataSourceError
from agl_slime.gateway.front import Front, listener
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import WorkerStore
from agl_slime.store.pipe import StorePipe, answer_calls
from agl_slime.store.server import UNNUMBERED
from agl_slime.support.agl import EnqueueRolloutRequest, Span, SpanCoreFields, TraceStatus
from agl_slime.support.handover import Given, Giver, Taker, channel
from agl_slime.support.http import listening

ASKED = b"GET /%b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Served:
    """A server that only has connections which are given to it, and who gives them; ``hold`` keeps an answer back."""

    def __init__(self, *, check_host: bool = True) -> None:
        given, taken = channel()
        self.giver, self.taker = Giver(given), Taker(taken, check_host=check_host)
        self.hold, self.came = asyncio.Event(), asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.came.set()
        if request.path == "/begun":
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"first ")
            await self.hold.wait()
            return response
        if request.path == "/held":
            await self.hold.wait()
        return web.Response(text="answered")

    def give(self) -> tuple[socket.socket, Given]:
        """The client's end, and what became of the other."""
        ours, theirs = socket.socketpair()
        with theirs:
            given = self.giver.give(theirs)
        ours.setblocking(False)
        return ours, given


@asynccontextmanager
async def serving(*, check_host: bool = True) -> AsyncIterator[Served]:
    served = Served(check_host=check_host)
    app = web.Application()
    app.router.add_get("/{path:.*}", served.answer)
    async with listening(app, host="127.0.0.1", port=0, backlog=8, taker=served.taker, shutdown_timeout=0.1):
        try:
            yield served
        finally:
            served.hold.set()
            served.giver.close()


async def ask(connection: socket.socket, what: bytes) -> bytes:
    """All that comes back until the connection ends."""
    loop, answer = asyncio.get_running_loop(), b""
    await loop.sock_sendall(connection, what)
    while piece := await loop.sock_recv(connection, 4096):
        answer += piece
    return answer


async def test_a_given_connection_is_answered_once_and_ends() -> None:
    async with serving() as served:
        connection, given = served.give()
        with connection:
            answer = await ask(connection, ASKED % b"one" + ASKED % b"two")
        await given.ended
        assert (given.begun, given.lost) == (True, False)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"\r\nConnection: close\r\n" in answer
    assert answer.endswith(b"answered")
    assert answer.count(b"answered") == 1  # the second might be another process's


@pytest.mark.parametrize(("check_host", "status"), [(True, b"403"), (False, b"200")])
async def test_who_may_ask_is_what_its_address_says(check_host: bool, status: bytes) -> None:
    async with serving(check_host=check_host) as served:
        connection, _ = served.give()
        with connection:
            answer = await ask(connection, b"GET / HTTP/1.1\r\nHost: trainer:80\r\n\r\n")
    assert answer.split()[1] == status


@pytest.mark.parametrize("what", [b"junk\r\n\r\n", b"GET / HTTP/1.1\r\nHo", b""], ids=["junk", "half", "nothing"])
async def test_what_is_no_request_is_not_kept(what: bytes) -> None:
    async with serving() as served:
        connection, given = served.give()
        with connection:
            await asyncio.get_running_loop().sock_sendall(connection, what)
            connection.shutdown(socket.SHUT_WR)
            await asyncio.wait_for(given.ended, 10)
        assert not given.lost


async def test_a_connection_that_cannot_be_served_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone(factory: object, connection: socket.socket) -> None:
        raise ConnectionResetError

    async with serving() as served:
        monkeypatch.setattr(asyncio.get_running_loop(), "connect_accepted_socket", gone)
        connection, given = served.give()
        with connection:
            await asyncio.wait_for(given.ended, 10)
            assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
        assert (given.begun, given.lost) == (False, False)


async def test_of_a_taker_that_ends_what_has_not_begun_is_lost() -> None:
    async with serving() as served:
        held, begun = served.give(), served.give()
        for (connection, _), path in ((held, b"held"), (begun, b"begun")):
            served.came.clear()
            await asyncio.get_running_loop().sock_sendall(connection, ASKED % path)
            await served.came.wait()
        first = await asyncio.get_running_loop().sock_recv(begun[0], 4096)
        assert first.startswith(b"HTTP/1.1 200")
        served.giver.close()
        served.giver.close()
        assert [(given.lost, given.ended.done()) for _, given in (held, begun)] == [(True, True), (False, True)]
        for connection, _ in (held, begun):
            connection.close()


async def test_no_end_is_forgotten_while_nobody_listens() -> None:
    async with serving() as served:
        asyncio.get_running_loop().remove_reader(served.giver._end)
        all_given: list[Given] = []
        for _ in range(40):  # ends and beginnings of 1,200 are more than the channel holds
            some = [served.give() for _ in range(30)]
            for connection, given in some:
                with connection:
                    assert (await ask(connection, ASKED % b"")).endswith(b"answered")
                all_given.append(given)
        assert not any(given.ended.done() for given in all_given)
        asyncio.get_running_loop().add_reader(served.giver._end, served.giver._hear)
        await asyncio.wait_for(asyncio.gather(*(given.ended for given in all_given)), 30)
        assert all(given.begun and not given.lost for given in all_given)


class Home:
    """As the front sees a worker."""

    process = None

    def __init__(self, served: Served) -> None:
        self.take = served.giver.give
        self.port = asyncio.get_running_loop().create_future()


@asynccontextmanager
async def fronted() -> AsyncIterator[tuple[Served, Front, Home]]:
    async with serving() as served:
        home = Home(served)
        async with Front([home], listener("127.0.0.1", 0), host="127.0.0.1", token=None) as front:
            yield served, front, home


async def connected(front: Front) -> socket.socket:
    connection = socket.socket()
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", int(front.url.rpartition(":")[2])))
    return connection


async def test_a_front_hands_over_what_it_has_not_read() -> None:
    async with fronted() as (served, front, _):
        with await connected(front) as connection:
            assert (await ask(connection, ASKED % b"")).endswith(b"answered")
        with await connected(front) as connection:
            held = asyncio.ensure_future(ask(connection, ASKED % b"held"))
            served.came.clear()
            await served.came.wait()
            assert front.under_way == 1
            served.hold.set()
            assert (await held).endswith(b"answered")


async def test_front_answers_503_when_a_worker_dies_before_reading_the_request() -> None:
    async with fronted() as (_, front, home):
        given, taken = channel()
        giver = Giver(given)
        home.take = giver.give
        with taken, await connected(front) as connection:
            body = b"x" * 300_000  # nobody has read it when the worker dies
            head = b"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 400000\r\n\r\n"
            asking = asyncio.ensure_future(ask(connection, head + body))
            while not front.under_way:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
            giver.close()
            answer = await asking
    assert answer.startswith(b"HTTP/1.1 503")
    assert b'"type":"error"' in answer  # as Anthropic's clients read it
    assert b"gateway's worker with this conversation has ended" in answer


async def test_a_line_in_two_packets_and_a_worker_that_is_behind_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fronted() as (served, front, home):
        app = web.Application()
        app.router.add_get("/{path:.*}", served.answer)
        async with listening(app, host="127.0.0.1", port=0, backlog=8) as url:
            home.port.set_result(int(url.rpartition(":")[2]))
            seen, passed = asyncio.Event(), front._passed

            async def passes(connection: socket.socket) -> None:
                seen.set()
                await passed(connection)

            monkeypatch.setattr(front, "_passed", passes)
            with await connected(front) as connection:
                await asyncio.get_running_loop().sock_sendall(connection, b"GE")
                await asyncio.wait_for(seen.wait(), 10)
                assert (await ask(connection, (ASKED % b"")[2:])).endswith(b"answered")

            def behind(connection: socket.socket) -> Given:
                raise BlockingIOError

            monkeypatch.setattr(home, "take", behind)
            with await connected(front) as connection:
                assert (await ask(connection, ASKED % b"")).endswith(b"answered")


# -- the store --------------------------------------------------------------------------------------------------------


async def test_store_over_a_pipe_equals_http_and_reports_a_closed_peer() -> None:
    store, (ours, theirs) = BridgeStore(), channel()
    answering = asyncio.create_task(answer_calls(store, ours))
    [rollout] = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input={}, mode="train")])
    attempt = await store.start_attempt(rollout.rollout_id)
    pipe = StorePipe(theirs)
    client = WorkerStore("http://127.0.0.1:9", between_s=0.0, pipe=pipe)
    names = (attempt.rollout_id, attempt.attempt.attempt_id)

    def span(at: int) -> Span:
        told: dict[str, Any] = {"text": f"“{at}”" * 20_000}
        status = TraceStatus(status_code="OK")
        core = SpanCoreFields(name=f"span {at}", attributes=told, status=status, start_time=1.0, end_time=1.0)
        return Span.from_core_fields(core, rollout_id=names[0], attempt_id=names[1], sequence_id=UNNUMBERED)

    written = await asyncio.gather(*(client.add_many_spans([span(at)]) for at in range(40)))
    found = await store.query_spans(*names)
    assert sorted(each.name for each in found) == sorted(f"span {at}" for at in range(40))
    assert sorted(one.sequence_id for [one] in written) == sorted(each.sequence_id for each in found)
    with pytest.raises(ValueError, match="nobody"):
        await client.update_attempt("nobody", "1", status="succeeded")
    for _ in range(20):  # callers that do not wait for their answer leave it to nobody else
        given_up = asyncio.ensure_future(pipe.ask(b'{"calls": [{"op": "nothing"}]}'))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait({given_up})
        answer = await pipe.ask(b'{"calls": []}')
        assert answer == {"results": []}
    answering.cancel()
    await asyncio.wait({answering})
    with pytest.raises(DataSourceError, match="the process that holds the store has ended"):
        await client.add_many_spans([span(41)])
    await client.close()
