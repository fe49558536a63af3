"""HTTP as the servers and clients of this package speak it; who may reach a server is in ``support.net``."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from yarl import URL

RETRIED_4XX = frozenset({408, 425, 429})
"""The statuses that blame the request and yet may pass: a time-out, too early, too many."""


@asynccontextmanager
async def listening(app: web.Application, *, host: str, port: int, backlog: int, **options: Any) -> AsyncIterator[str]:
    """Serve ``app`` within the block, which gets the URL that this machine reaches it at. ``port`` 0 takes a free one;
    ``options`` are those of ``web.AppRunner``."""
    runner = web.AppRunner(app, access_log=None, **options)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=backlog).start()
        reached = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        yield str(URL.build(scheme="http", host=reached, port=runner.addresses[0][1]))
    finally:
        await runner.cleanup()


def stop_signal() -> asyncio.Event:
    """Set when the process gets SIGINT or SIGTERM, instead of what these do otherwise. On the main thread's loop."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """An answer of strict JSON."""
    return web.Response(body=orjson.dumps(value), status=status, headers=headers, content_type="application/json")


async def ask(session: aiohttp.ClientSession, url: str, body: bytes | None = None, **options: Any) -> Any:
    """What a POST of ``body`` (JSON), or a GET without one, is answered with.

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
        message, info = raw[:500].decode(errors="replace"), response.request_info
        raise aiohttp.ClientResponseError(info, response.history, status=response.status, message=message)
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{url} did not answer with JSON: {error}") from error


def may_pass(error: Exception) -> bool:
    """Whether the same request may succeed later: broken connections, time-outs, 408, 425, 429 and 5xx."""
    if isinstance(error, aiohttp.ClientResponseError):
        return error.status >= 500 or error.status in RETRIED_4XX
    return isinstance(error, (aiohttp.ClientError, asyncio.TimeoutError, ConnectionError))
