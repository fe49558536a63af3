"""A server of the page, with updates while a run is in progress.

Closed by default: it listens on loopback and answers only requests that name this machine, so that no other site's page
reaches it through a browser. Any other address needs a token, sent once as ``?token=`` and then kept in a cookie.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from yarl import URL

from agl_slime.errors import ConfigError
from agl_slime.report.page import page, policy, run_data
from agl_slime.report.read import Convert, RunReader, distinct_names, find_runs, no_other_runs
from agl_slime.support.http import json_bytes, json_response, listening
from agl_slime.support.net import has_token, require_token
from agl_slime.support.threads import run_in_thread

TOKEN_VARIABLE = "AGL_SLIME_VIEW_TOKEN"
_COOKIE = "agl_slime_view"
_NOT_STORED = {"Cache-Control": "no-store"}
_POLL_INTERVAL_S = 1.0  # between reads of a followed run's files
_SHUTDOWN_S = 2.0  # longest wait for a browser's open connection


class _Runs:
    """The runs at the given paths; runs that appear later are appended."""

    def __init__(self, directories: Sequence[Path], convert: Convert) -> None:
        self._directories, self.convert = list(directories), convert
        self.paths: list[Path] = []
        self.refresh()

    def refresh(self) -> list[Path]:
        for directory in self._directories:
            self.paths += [path for path in find_runs(directory, self.convert) if path not in self.paths]
        return self.paths


class _Follower:
    """Readers of all runs for one page."""

    def __init__(self, runs: _Runs) -> None:
        self._runs = runs
        self._readers: dict[str, RunReader] = {}  # by the number of the run

    def changes(self) -> bytes | None:
        """The changes of each run since the last call as JSON; ``None`` without any."""
        paths = self._runs.refresh()
        for number in range(len(self._readers), len(paths)):
            self._readers[str(number)] = RunReader(paths[number], self._runs.convert)
        for reader, name in zip(self._readers.values(), distinct_names(paths), strict=True):
            reader.name = name  # another run of the same name may have appeared
        changes = [run_data(reader) for reader in self._readers.values()]
        return json_bytes(changes) if any(changes) else None

    def reader(self, number: str) -> RunReader | None:
        """The run of this number, up to date."""
        self.changes()
        return self._readers.get(number)


class _Viewer:
    def __init__(self, runs: _Runs, *, token: str | None, follow: bool) -> None:
        self._runs, self._token, self._follow = runs, token, follow
        self._follower, self._lock = _Follower(self._runs), asyncio.Lock()
        self.ending = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._admit])
        handlers = {"": self._page, "data": self._data, "events": self._events, "rollout": self._rollout}
        for name, handler in {**handlers, "ids": self._ids}.items():
            app.router.add_get(f"/{name}", handler)
        return app

    @web.middleware
    async def _admit(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self._token is None:
            return await handler(request)
        if query_token := request.query.get("token"):
            if not has_token(f"Bearer {query_token}", self._token):
                raise web.HTTPForbidden(text="This is not the token.")
            answer = web.HTTPFound("./")
            answer.set_cookie(_COOKIE, query_token, httponly=True, samesite="Strict")
            raise answer
        if not has_token(f"Bearer {request.cookies.get(_COOKIE, '')}", self._token):
            raise web.HTTPForbidden(text=f"A token is needed: add ?token=…, the value of {TOKEN_VARIABLE}.")
        return await handler(request)

    async def _page(self, _: web.Request) -> web.Response:
        title = ", ".join(distinct_names(self._runs.paths)[:3])
        text = await run_in_thread(page, title=title, live=True, follow=self._follow)
        rules = policy(live=True) + "; frame-ancestors 'none'"
        headers = {"Content-Security-Policy": rules, "X-Content-Type-Options": "nosniff", **_NOT_STORED}
        return web.Response(text=text, content_type="text/html", headers=headers)

    async def _data(self, _: web.Request) -> web.Response:
        runs = await run_in_thread(_Follower(self._runs).changes)
        return json_response(orjson.Fragment(runs or b"[]"), headers=_NOT_STORED)

    async def _rollout(self, request: web.Request) -> web.Response:
        number, rollout_id = request.query.get("run", ""), request.query.get("id", "")
        async with self._lock:  # all pages share the follower, which is not thread-safe
            reader = await run_in_thread(self._follower.reader, number)
            line = None if reader is None else await run_in_thread(reader.rollout, rollout_id)
        if line is None:
            raise web.HTTPNotFound(text=f"rollout {rollout_id!r} is not kept in run {number!r}")
        return json_response(orjson.Fragment(line), headers=_NOT_STORED)

    async def _ids(self, request: web.Request) -> web.Response:
        async with self._lock:
            reader = await run_in_thread(self._follower.reader, request.query.get("run", ""))
            ids = [] if reader is None else await run_in_thread(reader.ids_with, request.query.get("text", ""))
        return json_response(ids, headers=_NOT_STORED)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **_NOT_STORED})
        await response.prepare(request)
        follower = _Follower(self._runs)
        with suppress(ConnectionError):  # the browser disconnected
            ended = False
            while not ended:
                ended = self.ending.is_set()  # the last change says how the run ended
                changes = await run_in_thread(follower.changes)
                # a comment without changes, so that a disconnected browser is noticed
                await response.write(b": nothing new\n\n" if changes is None else b"data: %s\n\n" % changes)
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.ending.wait(), _POLL_INTERVAL_S)
        return response


@asynccontextmanager
async def serving(
    paths: Sequence[Path],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    follow: bool = False,
    convert: Convert = no_other_runs,
) -> AsyncIterator[str]:
    """Serve the page of the runs at or below ``paths`` during the block, whose value is the URL with the token.
    ``follow`` sends updates to pages. Raises ``ConfigError`` without a run, or for a
    ``host`` that other machines reach without a ``token``."""
    require_token(host, token, setting=TOKEN_VARIABLE)
    viewer = _Viewer(_Runs(paths, convert), token=token, follow=follow)
    app = viewer.app()
    server = listening(app, host=host, port=port, backlog=64, token=token, shutdown_timeout=_SHUTDOWN_S)
    async with AsyncExitStack() as stack:
        try:
            url = await stack.enter_async_context(server)
        except OSError as error:
            why = f"{error.strerror}; give another --port"
            raise ConfigError(f"{host} port {port} cannot be listened on: {why}") from error
        stack.callback(viewer.ending.set)
        yield str(URL(url).with_query(token=token)) if token else url
