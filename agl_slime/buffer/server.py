"""The Rollout Buffer over HTTP, with the requests and answers of slime's own server."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeVar

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from agl_slime import __version__
from agl_slime.buffer.models import ReadRequest, check, parse_body, parse_items
from agl_slime.buffer.service import RolloutBuffer
from agl_slime.buffer.settings import BufferSettings
from agl_slime.errors import BufferRequestError
from agl_slime.support.flags import parse_flags
from agl_slime.support.http import json_response, listening, read_body, stop_signal
from agl_slime.support.net import has_token
from agl_slime.support.terminal import log_to_stderr, print_line
from agl_slime.support.threads import run_in_thread, run_user_code

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BUFFER = web.AppKey("buffer", RolloutBuffer)
_RETRY_AFTER_S = "5"
# Threads that return from SQLite wait this long for the GIL while the event loop is busy; the default of 5 ms adds up
# to half a second for a batch of 256 items.
_SWITCH_INTERVAL_S = 0.0005


def _make_app(buffer: RolloutBuffer) -> web.Application:
    limit = int(buffer.settings.max_body_mb * 1_000_000)
    app = web.Application(middlewares=[_gate(buffer.settings)], client_max_size=limit)
    app[_BUFFER] = buffer
    app.add_routes(
        [
            web.post("/buffer/write", _write),
            web.post("/runs/{key}/buffer/write", _write),
            web.post("/get_rollout_data", _get_rollout_data),
            web.post("/start_rollout", _start_rollout),
            web.get("/stats", _get),
            web.get("/health", _get),
        ]
    )
    return app


class BufferServer:
    """A running server: ``async with BufferServer(settings=…) as server`` listens at ``server.url``."""

    def __init__(self, *, settings: BufferSettings) -> None:
        self._settings = settings
        self.url = ""

    async def __aenter__(self) -> BufferServer:
        settings = self._settings
        async with AsyncExitStack() as ends:
            # loads generator files, which are users' code
            self.buffer = await run_user_code(partial(RolloutBuffer, settings=settings))
            ends.push_async_callback(self.buffer.close)
            app, host, port = _make_app(self.buffer), settings.host, settings.port
            limits = {"token": settings.token, "stalled_s": settings.request_timeout_s, "shutdown_timeout": 3.0}
            self.url = await ends.enter_async_context(listening(app, host=host, port=port, backlog=1024, **limits))
            await self.buffer.start(self.url)
            self._ends = ends.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._ends.aclose()


async def _write(request: web.Request) -> web.Response:
    buffer = request.app[_BUFFER]
    key = request.match_info.get("key")
    task = None if key is None else buffer.task_of_key(key)
    if key is not None and task is None:
        raise BufferRequestError("this path belongs to no run of a generator", status=404)
    task_type, written = await _parsed(parse_items, request)
    if task is None:
        task = await buffer.task_for(task_type)
    new = await buffer.write(task, written)
    # The answer repeats the items, as slime's server does, unless the client prefers a minimal one (RFC 7240).
    minimal = "return=minimal" in request.headers.get("Prefer", "")
    echo = [] if minimal else [orjson.Fragment(item.body) for item in written]
    data = {"data": echo, "meta_info": "write to buffer", "written": new, "duplicates": len(written) - new}
    return json_response({"success": True, "message": "Data has been successfully written to buffer", "data": data})


async def _get_rollout_data(request: web.Request) -> web.Response:
    buffer = request.app[_BUFFER]
    read = check(ReadRequest, await _parsed(lambda raw: parse_body(raw or b"{}"), request))
    task = await buffer.task_for(read.task_type)
    batch = await buffer.read(task, batch_size=read.batch_size, request_id=read.request_id, ack=read.ack or ())
    if batch is None or not batch.items_json:
        nothing = {"data": [], "meta_info": {}}
        return json_response({"success": False, "message": "No data available to read", "data": nothing})
    data = {"data": [orjson.Fragment(item) for item in batch.items_json], "meta_info": batch.meta_info}
    return json_response({"success": True, "message": f"Successfully read {len(batch.items_json)} items", "data": data})


async def _start_rollout(request: web.Request) -> web.Response:
    return json_response(await request.app[_BUFFER].start_rollout(await _parsed(parse_body, request)))


async def _parsed(parse: Callable[[bytes], T], request: web.Request) -> T:
    try:
        return await read_body(request, parse)
    except web.RequestPayloadError as error:  # a broken encoding, or the client disconnected
        raise BufferRequestError(f"the body could not be read: {error}") from error


async def _get(request: web.Request) -> web.Response:
    if request.path == "/stats":
        return json_response(await run_in_thread(request.app[_BUFFER].stats))
    return json_response({"status": "ok", "version": __version__})


def _gate(settings: BufferSettings) -> Middleware:
    """The middleware of every handler: checks the token, and answers every refusal as JSON with one sentence."""

    def refuse(status: int, message: str, **headers: str) -> web.Response:
        return json_response({"success": False, "message": message}, status=status, headers=headers)

    @web.middleware
    async def gate(request: web.Request, handler: Handler) -> web.StreamResponse:
        is_open = request.path == "/health" or "key" in request.match_info
        if not is_open and not has_token(request.headers.get("Authorization"), settings.token):
            return refuse(401, "the token is missing or wrong; send it as `Authorization: Bearer TOKEN`")
        try:
            return await handler(request)
        except BufferRequestError as error:
            return refuse(error.status, str(error), **({"Retry-After": _RETRY_AFTER_S} if error.status == 503 else {}))
        except web.HTTPRequestEntityTooLarge:
            return refuse(413, f"the body is larger than {settings.max_body_mb:g} MB; send fewer items per request")
        except web.HTTPException as error:
            allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
            return refuse(error.status, f"{request.method} {request.path}: {error.reason}", **allow)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            logger.exception("%s %s failed.", request.method, request.path)
            return refuse(500, "the buffer failed to serve this request; its log says why")

    return gate


def main(arguments: Sequence[str]) -> None:
    """``agl-slime buffer``: serve until SIGINT or SIGTERM."""
    args = list(arguments)
    token = os.environ.get("AGL_SLIME_BUFFER_TOKEN")
    if token and not any(argument.split("=")[0] == "--token" for argument in args):
        args += ["--token", token]
    settings = parse_flags(BufferSettings, prog="agl-slime buffer", arguments=args)
    log_to_stderr(logging.INFO, "%(message)s")
    asyncio.run(_serve(settings))


async def _serve(settings: BufferSettings) -> None:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    ended = stop_signal()
    async with BufferServer(settings=settings) as server:
        place = f"kept in {settings.run_dir}" if settings.run_dir is not None else "in memory only; --run-dir keeps it"
        print_line(f"rollout buffer at {server.url} (items {place})")
        await ended.wait()
