"""HTTP servers and clients of this package; access rules are in ``support.net``."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import signal
import sys
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any, TypeVar

import aiohttp
import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from agl_slime.errors import ConfigError
from agl_slime.support.net import http_url, is_loopback, page_refusal, shown_url
from agl_slime.support.threads import run_in_thread

T = TypeVar("T")

INLINE_PARSE_BYTES = 256 * 1024  # bytes; JSON of 1 MB takes about 5 ms
_QUOTE = re.compile(r":\s*(?:b['\"]|bytearray)")  # aiohttp quotes the request's bytes after it
_DEEPEST = 250
_NEVER_DEEP = 200  # JSON with fewer brackets is not checked; orjson reads 1,024 levels and writes 254

RETRIED_4XX = frozenset({408, 425, 429})
"""Client-error statuses that are transient: timeout, too early, too many requests."""


def _brief(record: logging.LogRecord) -> bool:
    """Log malformed requests and broken connections in one line, without traceback, and without the request's bytes,
    which may contain a secret."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, (HttpProcessingError, ConnectionError)):
        why = getattr(error, "message", "") or str(error) or type(error).__name__
        client = record.args[0] if isinstance(record.args, tuple) and record.args else None
        event = "ended early" if isinstance(error, ConnectionError) else "sent malformed HTTP"
        text = " ".join(_QUOTE.split(str(why), maxsplit=1)[0].split())
        record.msg = f"A connection from {client or 'an unknown address'} {event}: {text:.200}"
        record.args, record.exc_info, record.exc_text = None, None, None
        record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
    return True


_connection_logger = logging.getLogger(f"{__name__}.connections")
_connection_logger.addFilter(_brief)


@asynccontextmanager
async def listening(
    app: web.Application,
    *,
    host: str,
    port: int,
    backlog: int,
    token: str | None = None,
    stalled_s: float = 30.0,
    **options: Any,
) -> AsyncIterator[str]:
    """Serve ``app`` while the block runs; yields the URL at which this machine reaches it. ``port`` 0 takes a free one;
    ``options`` go to ``web.AppRunner``.

    Requests that web pages make a browser send are refused (``net.page_refusal``); the Host is checked on loopback
    without a ``token``, which ``app`` itself requires. ``whole_body`` reads bodies. A connection is closed when it
    sends no request within ``stalled_s``, or less than 1 kB/s of a body.
    """
    if not 0 <= port <= 65_535:
        raise ConfigError(f"port must be from 0, which takes a free one, to 65535, got {port}")
    app.middlewares.insert(0, _guard(check_host=is_loopback(host) and not token, stalled_s=stalled_s))
    options = {"access_log": None, "logger": _connection_logger, "auto_decompress": False, **options}
    runner = web.AppRunner(app, keepalive_timeout=stalled_s, **options)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=backlog).start()
        here = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        yield http_url(here, runner.addresses[0][1])
    finally:
        await runner.cleanup()


def _guard(*, check_host: bool, stalled_s: float) -> Middleware:
    """A middleware that checks every request before its handler: see ``listening``."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal, status = page_refusal(request.headers, request.path, check_host=check_host), 403
        if refusal is None and (refusal := encoding_refusal(encoding_of(request.headers))) is not None:
            status = 415
        if refusal is None:
            if not request.content.is_eof():
                _watch(request, 0, stalled_s)
            try:
                return await handler(request)
            except web.RequestPayloadError as error:
                refusal, status = f"the body cannot be read: {error}", 400
        # with the fields of every server's errors
        return json_response({"success": False, "message": refusal, "error": {"message": refusal}}, status=status)

    return middleware


def _watch(request: web.Request, received: int, stalled_s: float) -> None:
    """Close the connection if its body progresses too slowly after ``received`` bytes."""

    def close_if_slow() -> None:
        if request.content.is_eof() or request.transport is None:
            return
        if request.content.total_bytes - received < 1000 * stalled_s:
            request.transport.abort()
        else:
            _watch(request, request.content.total_bytes, stalled_s)

    asyncio.get_running_loop().call_later(stalled_s, close_if_slow)


def stop_signal() -> asyncio.Event:
    """An event that SIGINT and SIGTERM set, instead of their default actions. Call it on the main thread's loop."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def read_body(request: web.Request, parse: Callable[[bytes], T]) -> T:
    """Parse the body; a large one in a thread."""
    raw = await whole_body(request)
    return parse(raw) if len(raw) <= INLINE_PARSE_BYTES else await run_in_thread(parse, raw)


async def whole_body(request: web.Request) -> bytes:
    """The body, decompressed. ``client_max_size`` limits the body as it is sent, and its content."""
    try:
        body = await decompressed(await request.read(), encoding_of(request.headers), most=request.client_max_size)
    except ValueError as error:
        raise web.RequestPayloadError(str(error)) from error
    if body is None:
        raise web.HTTPRequestEntityTooLarge(request.client_max_size)
    return body


def encoding_of(headers: Mapping[str, str]) -> str:
    """The Content-Encoding of a request, whose ``headers`` ignore case."""
    return headers.get("Content-Encoding", "").lower().removeprefix("x-") or "identity"


def encoding_refusal(encoding: str) -> str | None:
    """The reason to refuse a body of this Content-Encoding with 415; ``None`` where ``decompressed`` reads it."""
    if encoding in ("identity", "gzip", "deflate") or (encoding == "zstd" and _zstd() is not None):
        return None
    zstd = "; zstd is with Python 3.14 or the package backports.zstd" if encoding == "zstd" else ""
    return f"Content-Encoding {encoding!r:.40} is not read here: send gzip, deflate, or the body as it is{zstd}"


async def decompressed(raw: bytes, encoding: str, *, most: int) -> bytes | None:
    """The content of a body; ``None`` if it has more than ``most`` bytes, of which no more are decompressed. Raises
    ``ValueError`` for a broken or incomplete stream."""
    if encoding == "identity" or not raw:
        return raw
    if encoding == "zstd":
        stream = _zstd()
    elif encoding == "deflate":  # with zlib's header, or bare as some clients send it
        stream = zlib.decompressobj(zlib.MAX_WBITS if raw[0] & 15 == 8 else -zlib.MAX_WBITS)
    else:
        stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        content = await run_in_thread(stream.decompress, raw, most + 1)
    except Exception as error:  # zstd's class depends on its library
        raise ValueError(f"it is no {encoding}: {error}") from error
    if len(content) > most:
        return None
    if not stream.eof or stream.unused_data:
        raise ValueError(f"it is {'more than one' if stream.eof else 'no whole'} {encoding} stream")
    return content


def _zstd() -> Any:
    """A decompressor of zstd; ``None`` where Python has none."""
    try:
        return import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd").ZstdDecompressor()
    except ImportError:
        return None


def parse_json(raw: bytes) -> Any:
    """``json_value`` that can be written again by ``json_bytes``, even some levels deeper. Raises ``ValueError`` with
    one sentence."""
    try:
        value = json_value(raw)
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    if raw.count(b"[") + raw.count(b"{") > _NEVER_DEEP and is_too_deep(value):
        raise ValueError("the body is nested more than 250 deep; send flatter JSON")
    return value


def is_too_deep(value: Any) -> bool:
    """Whether a value of JSON is nested more than 250 deep; what Python itself refuses depends on its version."""
    try:
        orjson.dumps([[[[value]]]])  # it will be nested in other values
    except orjson.JSONEncodeError:  # too deep, or an integer above 64 bit
        level = [value]
        for _ in range(_DEEPEST):
            level = [child for parent in level for child in _children(parent)]
        return bool(level)
    return False


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A response with strict JSON."""
    return web.Response(body=json_bytes(value), status=status, headers=headers, content_type="application/json")


def json_bytes(value: Any) -> bytes:
    """Strict JSON; unlike orjson's, with integers above 64 bit, and lone surrogates as escapes."""
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError:
        return json.dumps(value, allow_nan=False).encode()


_DIGITS = bytes(ord("0") if chr(code).isdecimal() else code for code in range(256))
_LONG = b"0" * 19  # the digits of 2**63


def _has_long_number(raw: bytes) -> bool:
    """Whether there may be an integer above 63 bits (decimals do not count)."""
    zeros = raw.translate(_DIGITS)
    return zeros.count(_LONG) > zeros.count(b"." + _LONG)


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _no_number(text)


def json_value(raw: bytes) -> Any:
    """Parse strict JSON; integers above 64 bit stay exact, while orjson makes them floats. Raises ``ValueError``."""
    if not _has_long_number(raw):
        return orjson.loads(raw)
    try:
        value = json.loads(raw, parse_constant=_no_number, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()  # refuses half a character, as orjson does
        return value
    except RecursionError:
        raise ValueError("it is nested too deep") from None


async def request_json(session: aiohttp.ClientSession, url: str, body: bytes | None = None, **options: Any) -> Any:
    """The JSON answer to a POST of ``body`` (JSON), or to a GET without one.

    Raises:
        aiohttp.ClientError: the server cannot be reached; ``ClientResponseError`` with its text when it answers with an
            error.
        ValueError: the answer is not JSON.
        asyncio.TimeoutError: no answer within the session's time limit.
    """
    method, headers = ("GET", None) if body is None else ("POST", {"Content-Type": "application/json"})
    async with session.request(method, url, data=body, headers=headers, **options) as response:
        raw = await response.read()
    if response.status >= 400:
        message, address = raw[:500].decode(errors="replace"), URL(shown_url(str(response.request_info.url)))
        info = aiohttp.RequestInfo(address, method, CIMultiDictProxy(CIMultiDict()))  # the headers have the token
        raise aiohttp.ClientResponseError(info, response.history, status=response.status, message=message)
    try:
        return json_value(raw)
    except ValueError as error:
        raise ValueError(f"{shown_url(str(url))} did not answer with JSON: {error}") from error


def is_transient(error: Exception) -> bool:
    """Whether a retry may succeed: after broken connections, timeouts, 408, 425, 429 and 5xx."""
    if isinstance(error, aiohttp.ClientResponseError):
        return error.status >= 500 or error.status in RETRIED_4XX
    return isinstance(error, (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError))
