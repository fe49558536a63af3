"""What every server of the package refuses and cuts off, whatever it serves: engine, buffer, gateway, view, store."""

from __future__ import annotations

import asyncio
import gzip
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from agl_slime.buffer.server import BufferServer
from agl_slime.buffer.settings import BufferSettings
from agl_slime.gateway.server import Gateway
from agl_slime.report.view import serving
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.feed import FEED_PATH
from agl_slime.store.server import BATCH_PATH, StoreService
from agl_slime.support.http import listening
from tests.harness.report_runs import write_run

SERVERS = ("engine", "buffer", "gateway", "view")


@pytest.fixture(params=SERVERS)
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    if request.param == "engine":
        yield request.getfixturevalue("embedded_engine")
    elif request.param == "buffer":
        async with BufferServer(settings=BufferSettings(port=0, input_dir=(tmp_path,))) as server:
            yield server.url
    elif request.param == "gateway":
        with Gateway() as gateway:
            yield gateway.url
    else:
        async with serving([write_run(tmp_path, iterations=1)]) as url:
            yield url.rstrip("/")


async def answer_to(url: str, *head: bytes, body: bytes = b"") -> int | None:
    """The status; ``None`` where the connection was closed without one."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        length = b"Content-Length: %d" % len(body)
        writer.write(b"\r\n".join([*head, length, b"Connection: close", b"", body]))
        await writer.drain()
        line = (await asyncio.wait_for(reader.read(), 10)).split(b" ", 2)
        return int(line[1]) if len(line) > 1 else None
    finally:
        writer.close()


@pytest.mark.parametrize("path", [b"/health", b"/start_rollout", b"/v1/chat/completions", b"/generate", b"/data"])
async def test_requests_with_a_foreign_host_or_origin_are_403(url: str, path: bytes) -> None:
    own = urlsplit(url).netloc.encode()
    for method in (b"GET", b"POST", b"OPTIONS"):
        head = method + b" " + path + b" HTTP/1.1"
        for origin in (b"http://evil.example", b"null", b"http://" + own + b".evil.example", b"", b"\xff"):
            assert await answer_to(url, head, b"Host: " + own, b"Origin: " + origin) == 403, origin
        # the page's own name, which was bound to this machine's address
        names = (b"evil.example", b"10.0.0.7:80", b"[::2]", b"localhost.evil.example:80", b"")
        for host in names:
            assert await answer_to(url, head, b"Host: " + host, b"Origin: http://" + host) == 403, host
            assert await answer_to(url, head, b"Host: " + host) == 403, host


@pytest.mark.parametrize("host", [b"[", b"]", b"a b", b"\xff\xfe", b"127.0.0.1:x", b"//", b"127.0.0.1:99999999", b"@"])
async def test_a_host_that_is_none_is_an_answer_and_no_failure(url: str, host: bytes) -> None:
    status = await answer_to(url, b"GET / HTTP/1.1", b"Host: " + host)
    assert status is not None
    assert status < 500


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:1", "[::1]:80", "127.8.8.8"])
async def test_this_machine_is_served_by_all_of_its_names(url: str, host: str) -> None:
    own = f"http://{host}"
    for headers in ([f"Host: {host}"], [f"Host: {host}", f"Origin: {own}"], []):
        lines = [line.encode() for line in headers]
        assert await answer_to(url, b"GET /nothing HTTP/1.0", *lines) in (401, 404)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
async def test_a_compressed_body_is_refused_and_not_unpacked(url: str, encoding: str) -> None:
    async with aiohttp.ClientSession() as session:
        for body in (gzip.compress(bytes(10_000_000)), b"junk"):
            async with session.post(f"{url}/generate", data=body, headers={"Content-Encoding": encoding}) as answer:
                assert answer.status == 415
                assert "compressed" in (await answer.json())["message"]


@asynccontextmanager
async def impatient(stalled_s: float = 0.2) -> AsyncIterator[tuple[str, int]]:
    """A server that cuts off what does not go on."""

    async def size(request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.read())))

    app = web.Application(client_max_size=10**8)
    app.router.add_post("/", size)
    async with listening(app, host="127.0.0.1", port=0, backlog=64, stalled_s=stalled_s) as url:
        place = urlsplit(url)
        yield str(place.hostname), place.port or 0


@asynccontextmanager
async def impatient_store(stalled_s: float = 0.2) -> AsyncIterator[tuple[str, int]]:
    with StoreService(store=BridgeStore(), stalled_s=stalled_s) as service:
        place = urlsplit(service.url)
        yield str(place.hostname), place.port or 0


HALF_OPEN = [
    b"",
    b"POST / HT",
    b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Le",
    b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{",
    b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
]


async def test_a_half_open_request_to_a_served_store_is_cut_off() -> None:
    async def cut(host: str, port: int, sent: bytes) -> None:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(sent.replace(b"POST /", b"POST " + BATCH_PATH.encode()))
        await writer.drain()
        with suppress(ConnectionResetError):
            await asyncio.wait_for(reader.read(), 10)  # to the end
        writer.close()

    whole = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 12\r\n\r\n" + b'{"calls":[]}'
    async with impatient_store() as (host, port):
        await asyncio.gather(*(cut(host, port, before + sent) for before in (b"", whole) for sent in HALF_OPEN))


async def test_a_served_store_waits_for_a_slow_body_and_lets_its_followers_wait() -> None:
    async with impatient_store(1.0) as (host, port), aiohttp.ClientSession(f"http://{host}:{port}") as session:

        async def slow() -> AsyncIterator[bytes]:
            for _ in range(40):  # 1.6 s in all, more than a body may stand still
                yield b" " * 2000
                await asyncio.sleep(0.04)
            yield b'{"calls":[]}'

        async with session.post(BATCH_PATH, data=slow()) as answer:
            assert (answer.status, await answer.json()) == (200, {"results": []})
        async with session.post(FEED_PATH, json={"wait_s": 1.6}) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("sent", HALF_OPEN)
async def test_a_request_that_stays_half_open_is_cut_off(sent: bytes) -> None:
    async with impatient() as (host, port):
        whole = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\n1"
        for before in (b"", whole):  # as the first of a connection, and after another
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(before + sent)
            await writer.drain()
            with suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 10)  # to the end
            writer.close()


async def test_slow_body_that_keeps_arriving_is_read() -> None:
    async with impatient(1.0) as (host, port):
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: 80000\r\n\r\n")
        for _ in range(40):  # 1.6 s in all, more than a body may stand still
            writer.write(bytes(2000))
            await writer.drain()
            await asyncio.sleep(0.04)
        assert (await asyncio.wait_for(reader.read(), 10)).endswith(b"80000")
        writer.close()


SECRET = b"a-secret-of-the-run"
_HEAD = b"POST /k/" + SECRET + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n"
MALFORMED = {
    "a length that is no number": _HEAD + b"Content-Length: abc\r\n\r\n{}",
    "a negative length": _HEAD + b"Content-Length: -5\r\n\r\n{}",
    "two lengths": _HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}",
    "a length and chunks": _HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    "an odd chunk size": _HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n0\r\n\r\n",
    "a chunk too long": _HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhelloXX\r\n0\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x12\x04\x00\x00\x00\x00\x00",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100) + b"\r\n\r\n",
    "a long header": _HEAD + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": _HEAD + b"X: 1\r\n" * 20_000 + b"\r\n",
    "a long address": b"GET /k/" + SECRET + b"a" * 100_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "an odd address": b"GET /k/" + SECRET + b"\xff\xfe%%zz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    "an odd header": _HEAD + b"Authorization: Bearer " + SECRET + b"\x00\r\n\r\n",
    "no whole body": _HEAD + b"Content-Length: 500\r\n\r\n{}",
}


@contextmanager
def lines_of(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    """What servers log within the block; uvicorn's logger hands nothing on."""
    logging.getLogger("uvicorn").addHandler(caplog.handler)
    caplog.clear()
    try:
        with caplog.at_level(logging.INFO):
            yield caplog.records
    finally:
        logging.getLogger("uvicorn").removeHandler(caplog.handler)


async def refused(url: str, path: bytes, sent: bytes) -> None:
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    writer.write(sent.replace(b"POST /k/" + SECRET, b"POST " + path))
    with suppress(ConnectionError):
        await writer.drain()
        writer.write_eof()
        status = (await asyncio.wait_for(reader.read(2**16), 20)).split(b" ", 2)
        assert status[0] == b"" or 400 <= int(status[1]) < 500, status
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize("url", [name for name in SERVERS if name != "engine"], indirect=True)  # a process of its own
@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_http_is_a_line_of_the_log_and_no_traceback(
    url: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with lines_of(caplog) as lines:
        await refused(url, b"/k/" + SECRET, MALFORMED[name])
        assert await answer_to(url, b"GET /nothing HTTP/1.0") in (401, 404)
    assert [line.getMessage() for line in lines if line.exc_info or line.levelno > logging.WARNING] == []
    assert len(lines) <= 1
    assert all(SECRET.decode() not in line.getMessage() for line in lines)
    assert all(len(line.getMessage()) < 300 for line in lines)
    if name not in ("TLS", "no whole body"):  # which a server of the internet sees all day
        assert ["127.0.0.1 sent malformed HTTP" in line.getMessage() for line in lines] == [True]


@pytest.mark.parametrize("path", [BATCH_PATH, FEED_PATH, "/v1/agl/queues/rollouts/enqueue"])
async def test_malformed_http_is_a_line_of_a_served_stores_log(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with StoreService(store=BridgeStore()) as service, lines_of(caplog) as lines:
        for sent in MALFORMED.values():
            await refused(service.url, path.encode(), sent)
        assert await answer_to(service.url, b"GET /v1/agl/health HTTP/1.0") == 200
    assert [line.getMessage() for line in lines if line.exc_info or line.levelno > logging.WARNING] == []
    assert len(lines) <= len(MALFORMED)


def test_nothing_listens_but_by_the_function_that_guards() -> None:
    package = Path(__file__).parents[2] / "agl_slime"
    names = ("AppRunner", "TCPSite", "run_app", "start_server", "create_server", "HTTPServer")
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(name in path.read_text() for name in names)
    }
    passes_on = {"environments/runtimes/bubblewrap.py"}  # bytes, to what runs in a sandbox
    assert found == {"support/http.py"} | passes_on
