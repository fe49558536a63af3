"""Refusals and time limits of every server of the package: engine, buffer, gateway, view, store."""

import asyncio
import gzip
import logging
import sys
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from agl_slime.buffer.server import BufferServer
from agl_slime.buffer.settings import BufferSettings
from agl_slime.errors import ConfigError
from agl_slime.gateway.server import Gateway
from agl_slime.report.view import serving
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.feed import FEED_PATH
from agl_slime.store.server import BATCH_PATH, StoreService
from agl_slime.support.agl import LLM
from agl_slime.support.http import decompressed, encoding_refusal, listening, request_json
from agl_slime.support.net import has_token, is_loopback, require_token, shown_url
from agl_slime.tools.record.recorder import RecordGateway
from tests.harness.report_runs import write_run

SERVERS = ("engine", "buffer", "gateway", "view")


@pytest.fixture(params=SERVERS)
async def url(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[str]:
    if request.param == "engine":
        yield request.getfixturevalue("embedded_engine")
    elif request.param == "buffer":
        async with BufferServer(settings=BufferSettings(port=0, input_dir=(tmp_path,), max_body_mb=8)) as server:
            yield server.url
    elif request.param == "gateway":
        with Gateway() as gateway:
            yield gateway.url
    elif request.param == "recorder":
        with RecordGateway(directory=tmp_path, llm=LLM(endpoint="http://unset", model="m")) as recorder:
            yield recorder.rollouts_url.removesuffix("/rollouts")
    elif request.param == "store":
        request.getfixturevalue("monkeypatch").setattr("agl_slime.store.server._MAX_BODY", 2**23)
        with StoreService(store=BridgeStore()) as service:
            yield service.url
    else:
        async with serving([write_run(tmp_path, iterations=1)]) as url:
            yield url.rstrip("/")


async def exchange(url: str, sent: bytes) -> bytes:
    """The answer up to the end of the connection, which may be reset; nothing more is sent."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    answer = b""
    try:
        writer.write(sent)
        with suppress(ConnectionError):
            await writer.drain()
            answer = await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()
    return answer


async def status_of(url: str, *head: bytes) -> int | None:
    """``None`` where the connection was closed without an answer."""
    line = (await exchange(url, b"\r\n".join([*head, b"Content-Length: 0", b"Connection: close", b"", b""]))).split(
        b" "
    )
    return int(line[1]) if len(line) > 1 else None


@pytest.mark.parametrize("path", [b"/health", b"/start_rollout", b"/v1/chat/completions", b"/generate", b"/data"])
@pytest.mark.parametrize("url", [*SERVERS, "store"], indirect=True)
async def test_requests_with_a_foreign_host_or_origin_are_403(url: str, path: bytes) -> None:
    local = urlsplit(url).netloc.encode()
    for method in (b"GET", b"POST", b"OPTIONS"):
        head = method + b" " + path + b" HTTP/1.1"
        for origin in (b"http://evil.example", b"null", b"http://" + local + b".evil.example", b"", b"\xff"):
            assert await status_of(url, head, b"Host: " + local, b"Origin: " + origin) == 403, origin
        for site in (b"cross-site", b"same-site", b"telepathic"):  # an image's request has no Origin
            for kind in (b"image", b"iframe", b"document"):
                sent = b"Sec-Fetch-Site: " + site, b"Sec-Fetch-Dest: " + kind
                assert await status_of(url, head, b"Host: " + local, *sent) == 403, sent
        # a page's name that was bound to this machine's address
        for host in (b"evil.example", b"10.0.0.7:80", b"[::2]", b"localhost.evil.example:80", b""):
            assert await status_of(url, head, b"Host: " + host, b"Origin: http://" + host) == 403, host
            assert await status_of(url, head, b"Host: " + host) == 403, host


@pytest.mark.parametrize("url", [*SERVERS, "store"], indirect=True)
async def test_an_image_of_a_page_changes_nothing_and_a_link_is_followed(url: str) -> None:
    for path in (b"/flush_cache", b"/stats", b"/"):
        head = b"GET " + path + b" HTTP/1.1", b"Host: " + urlsplit(url).netloc.encode()
        assert await status_of(url, *head, b"Sec-Fetch-Site: cross-site", b"Sec-Fetch-Dest: image") == 403
        plain = await status_of(url, *head)
        for site in (b"none", b"same-origin"):  # of the address bar, of the server's own page
            assert await status_of(url, *head, b"Sec-Fetch-Site: " + site, b"Sec-Fetch-Dest: image") == plain != 403
        linked = await status_of(url, *head, b"Sec-Fetch-Site: cross-site", b"Sec-Fetch-Dest: document")
        assert linked == (plain if path == b"/" else 403)


@pytest.mark.parametrize("url", [*SERVERS, "store"], indirect=True)
async def test_malformed_hosts_are_answered_and_all_names_of_this_machine_served(url: str) -> None:
    for host in (b"[", b"a b", b"\xff\xfe", b"127.0.0.1:x", b"//", b"127.0.0.1:99999999", b"@"):
        status = await status_of(url, b"GET / HTTP/1.1", b"Host: " + host)
        assert status is not None
        assert status < 500
    for host in (b"127.0.0.1", b"LOCALHOST:1", b"[::1]:80", b"127.8.8.8"):
        for lines in ([b"Host: " + host], [b"Host: " + host, b"Origin: http://" + host], []):
            assert await status_of(url, b"GET /nothing HTTP/1.0", *lines) in (200, 401, 404)  # 200: a dashboard


READ = {  # requests whose answer depends on their body
    "engine": ("/v1/detokenize", b'{"tokens": [5]}'),
    "buffer": ("/get_rollout_data", b'{"task_type": "nobody\'s"}'),
    "recorder": ("/rollouts", b'{"metadata": 5}'),
    "store": (BATCH_PATH, b'{"calls": [5]}'),
}
BITS = {"gzip": 31, "X-GZIP": 31, "deflate": 15, "Deflate": -15}  # of zlib; some clients send deflate without a header
BLOCK = zlib.compressobj(9, wbits=-15)
BOMB = gzip.compress(b"")[:10] + (BLOCK.compress(bytes(2**20)) + BLOCK.flush(zlib.Z_FULL_FLUSH)) * 1024


@pytest.mark.parametrize("url", READ, indirect=True)
async def test_a_compressed_body_is_read_up_to_the_limit(url: str, request: pytest.FixtureRequest) -> None:
    path, body = READ[request.node.callspec.params["url"]]
    async with aiohttp.ClientSession() as session:

        async def sent(content: bytes, encoding: str) -> tuple[int, str]:
            async with session.post(url + path, data=content, headers={"Content-Encoding": encoding}) as answer:
                return answer.status, await answer.text()

        plain = await sent(body, "identity")
        assert plain != await sent(b"", "gzip")
        for encoding, bits in BITS.items():
            packed = zlib.compress(body, wbits=bits)
            assert await sent(packed, encoding) == plain, encoding
            for broken in (packed[:-3], packed[:4] + b"junk", packed * 2, b"{}"):
                status, text = await sent(broken, encoding)
                assert (status, "the body cannot be read: it is " in text or "could not be read" in text) == (400, True)
        tracemalloc.start()
        try:
            assert (await sent(BOMB, "gzip"))[0] == 413
            assert tracemalloc.get_traced_memory()[1] < 4 * 2**23
        finally:
            tracemalloc.stop()
        for encoding in ("br", "gzip, gzip", "compress"):
            status, text = await sent(body, encoding)
            assert (status, "send gzip, deflate, or the body as it is" in text) == (415, True)
        assert await sent(body, "identity") == plain


async def test_zstd_is_read_where_python_has_it() -> None:
    library = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
    if find_spec(library.partition(".")[0]) is None:
        refusal = encoding_refusal("zstd")
        assert refusal is not None
        assert "backports.zstd" in refusal
        return
    packed = import_module(library).compress(b"{}")
    assert encoding_refusal("zstd") is None
    assert await decompressed(packed, "zstd", most=9) == b"{}"
    assert await decompressed(packed, "zstd", most=1) is None
    for broken in (packed[:-1], packed * 2, b"junk"):
        with pytest.raises(ValueError, match="zstd"):
            await decompressed(broken, "zstd", most=9)


# -- stalled clients -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def impatient(kind: str, stalled_s: float) -> AsyncIterator[str]:
    """The URL of a server that cuts stalled requests off."""

    async def size(request: web.Request) -> web.Response:
        return web.json_response({"results": [] if await request.read() else None})

    if kind == "store":
        with StoreService(store=BridgeStore(), stalled_s=stalled_s) as service:
            yield service.url
        return
    app = web.Application(client_max_size=10**8)
    app.router.add_post(BATCH_PATH, size)
    async with listening(app, host="127.0.0.1", port=0, backlog=64, stalled_s=stalled_s) as url:
        yield url


_POST = b"POST " + BATCH_PATH.encode() + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n"
HALF_OPEN = [
    b"",
    b"POST / HT",
    _POST + b"Content-Le",
    _POST + b"Content-Length: 100\r\n\r\n{",
    _POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n",
]


@pytest.mark.parametrize("kind", ["application", "store"])
async def test_a_request_that_stays_half_open_is_cut_off(kind: str) -> None:
    whole = _POST + b'Content-Length: 12\r\n\r\n{"calls":[]}'
    async with impatient(kind, 0.2) as url:
        # as the first of a connection, and after another
        await asyncio.gather(*(exchange(url, earlier + sent) for earlier in (b"", whole) for sent in HALF_OPEN))


@pytest.mark.parametrize("kind", ["application", "store"])
async def test_a_slow_body_is_read_or_cut_off_and_followers_may_wait(kind: str) -> None:
    async def slow(piece: bytes) -> AsyncIterator[bytes]:
        for _ in range(40):  # 1.2 s in all, longer than the limit of a stall
            yield piece
            await asyncio.sleep(0.03)
        yield b'{"calls":[]}'

    async with impatient(kind, 0.8) as url, aiohttp.ClientSession(url) as session:
        cut = asyncio.ensure_future(session.post(BATCH_PATH, data=slow(b" ")))
        async with session.post(BATCH_PATH, data=slow(b" " * 2000)) as answer:
            assert (answer.status, await answer.json()) == (200, {"results": []})
        with pytest.raises(aiohttp.ClientError):
            await cut
        if kind == "store":
            async with session.post(FEED_PATH, json={"wait_s": 1.2}) as answer:
                assert answer.status == 200


# -- malformed HTTP --------------------------------------------------------------------------------------------------

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


# the engine is another process
@pytest.mark.parametrize("url", ["buffer", "gateway", "view", "store"], indirect=True)
async def test_malformed_http_is_a_line_of_the_log_and_no_traceback(url, request, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("uvicorn"), "handlers", [caplog.handler])  # its logger does not propagate
    caplog.set_level(logging.INFO)
    store = request.node.callspec.params["url"] == "store"
    for name, sent in MALFORMED.items():
        caplog.clear()
        place = urlsplit(url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        writer.write(sent.replace(b"POST /k/" + SECRET, b"POST " + BATCH_PATH.encode()) if store else sent)
        with suppress(ConnectionError):
            await writer.drain()
            writer.write_eof()
            status = (await asyncio.wait_for(reader.read(2**16), 20)).split(b" ", 2)
            assert status[0] == b"" or 400 <= int(status[1]) < 500, (name, status)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        assert await status_of(url, b"GET /nothing HTTP/1.0") in (200, 401, 404), name
        messages = caplog.messages
        assert not [line for line in caplog.records if line.exc_info or line.levelno > logging.WARNING], name
        assert len(messages) <= 1, name
        if store:
            continue
        assert all(SECRET.decode() not in message and len(message) < 300 for message in messages), name
        if name not in ("TLS", "no whole body"):  # which a server of the internet gets all day
            assert ["127.0.0.1 sent malformed HTTP" in message for message in messages] == [True], name


def test_nothing_listens_but_by_the_function_that_guards() -> None:
    package = Path(__file__).parents[2] / "agl_slime"
    names = ("AppRunner", "TCPSite", "run_app", "start_server", "create_server", "HTTPServer")
    listeners = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(name in path.read_text() for name in names)
    }
    # bubblewrap passes bytes to a program in a sandbox
    assert listeners == {"support/http.py", "environments/runtimes/bubblewrap.py"}


# -- closed by default -------------------------------------------------------------------------------------------------

LOOPBACK = {"127.0.0.1", "127.8.8.8", "::1", "localhost"}


@pytest.mark.parametrize("host", [*sorted(LOOPBACK), "0.0.0.0", "::", "10.0.0.7", "host.example", ""])
def test_addresses_that_others_reach_need_a_token(host: str):
    assert is_loopback(host) == (host in LOOPBACK)
    require_token(host, "secret", setting="--token")
    if host in LOOPBACK:
        require_token(host, None, setting="--token")
    else:
        with pytest.raises(ConfigError, match="--token"):
            require_token(host, "", setting="--token")


@pytest.mark.parametrize("header", [None, "secret", "Bearer", "Bearer secre", "Bearer secret ", "Bearer s\udcffcret"])
def test_only_the_token_opens(header: str | None):
    assert not has_token(header, "secret")
    assert has_token("Bearer secret", "secret")
    assert has_token(header, None)


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid", "x" * 70])
def test_an_address_of_another_machine_is_named_before_anything_listens(host: str) -> None:
    with pytest.raises(ConfigError, match=f"host '{host}' is not an address of this machine"):
        StoreService(store=BridgeStore(), host=host, token="t" * 20)
    for local in ("127.0.0.1", "0.0.0.0", "localhost"):
        StoreService(store=BridgeStore(), host=local, token="t" * 20)


async def test_an_error_does_not_show_the_key_of_its_request() -> None:
    key = {"Authorization": "Bearer SECRET"}
    async with (
        listening(web.Application(), host="127.0.0.1", port=0, backlog=1) as url,
        aiohttp.ClientSession(headers=key) as session,
    ):
        with pytest.raises(aiohttp.ClientResponseError) as raised:
            await request_json(session, f"{url}/x?key=SECRET")
    assert "SECRET" not in repr(raised.value) + str(raised.value)
    text = "What is this? See http://a/b c?d, and https://h/k/SECRET/v1?SECRET#SECRET or http://u:SECRET@h."
    assert shown_url(text) == "What is this? See http://a/b c?d, and https://h/k/***/v1?*** or http://***@h."
    assert [*map(shown_url, ("u:S@h:1", "http://u:S/S?S#S@h", "a=m:7b@http://h"))] == [
        "***@h:1",
        "http://***@h",
        "a=m:7b@http://h",
    ]


@pytest.mark.parametrize("port", [-1, 65_536])
async def test_a_port_out_of_range_is_named(port: int) -> None:
    with pytest.raises(ConfigError, match=f"port must be from 0, which takes a free one, to 65535, got {port}"):
        async with listening(web.Application(), host="127.0.0.1", port=port, backlog=1):
            pass
