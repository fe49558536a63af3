"""``StoreService``: a ``BridgeStore`` served over HTTP by Agent Lightning's server, with four more routes:

- ``POST /agl_slime/v1/finished`` with ``{"server_instance_id", "after", "wait_s"}``: the rollouts that ended after
  position ``after``, as soon as there are any. The cost does not grow with the age of the store.
- ``POST /agl_slime/v1/cancelled``: the same for cancelled rollouts; runners in other processes follow it.
- ``POST /agl_slime/v1/batch``: many calls in one request.
- ``POST /agl_slime/v1/plan`` with ``{"step"}``: the plan of a training step, one rollout of each of its groups.

A body of more than 512 MB, sent or decompressed, gets 413 on any route. Other requests are served while a large one is
executed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any, TypeVar
from weakref import WeakKeyDictionary

import orjson
from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import ClientDisconnect

from agl_slime.errors import ConfigError
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.feed import CANCELLED_PATH, FEED_PATH, FeedPage, FeedPosition, FinishedFeed
from agl_slime.support.agl import LightningStore, LightningStoreClient, LightningStoreServer, Rollout, Span
from agl_slime.support.http import INLINE_PARSE_BYTES, decompressed, encoding_of, encoding_refusal, is_too_deep
from agl_slime.support.net import has_token, page_refusal, public_host, require_local_address, require_token
from agl_slime.support.threads import run_blocking, run_in_thread

T = TypeVar("T")

BATCH_PATH = "/agl_slime/v1/batch"
PLAN_PATH = "/agl_slime/v1/plan"
TOKEN_VARIABLE = "AGL_SLIME_STORE_TOKEN"

UNNUMBERED = 0
"""Sequence id of a span that the store numbers when it is written."""

_CANCELLED_WINDOW = 10_000
_PLANS = 16  # newest training steps whose plans are kept
_SLICE = 100  # calls or spans that are executed (in milliseconds) before the loop serves other requests
_AGL_ROUTES = "/v1/agl"
_CUT_SHORT = "the connection ended before the end of the body"
_MAX_BODY = 512 * 2**20  # bytes; this package's clients send at most 32 MB and one more call


class StoreService:
    """Serves a ``BridgeStore`` and its feed over HTTP, from ``start`` (or the ``with`` block) to ``stop``.

    Args:
        store: the store of this process; others in the process may use it directly.
        host: the address to bind. Any address but a loopback address needs ``token``, which every request must then
            carry as a bearer token.
        port: 0 takes a free one.
        stalled_s: a connection is cut after this time without a request, or with less than 1 kB/s of one.
    """

    def __init__(
        self,
        *,
        store: BridgeStore,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        stalled_s: float = 30.0,
    ) -> None:
        require_token(host, token, setting=TOKEN_VARIABLE)
        require_local_address(host)
        from agentlightning.utils.server_launcher import PythonServerLauncherArgs

        self.feed = FinishedFeed()
        self.cancellations = FinishedFeed(window=_CANCELLED_WINDOW)
        self._plans: dict[int, list[str]] = {}
        self._store = store
        access_host = "127.0.0.1" if host == "localhost" else public_host(host)
        if ":" in access_host:  # Agent Lightning writes it into a URL
            access_host = f"[{access_host}]"
        arguments = PythonServerLauncherArgs(
            host=host,
            port=port or None,
            access_host=access_host,
            launch_mode="thread",
            healthcheck_url=None,  # the launcher's own check carries no token
            log_level=logging.WARNING,
        )
        self._stalled_s = stalled_s
        self._server = LightningStoreServer(store=store, launcher_args=arguments)
        self._add_routes(token)
        self._unsubscribe: Callable[[], object] | None = None

    @property
    def url(self) -> str:
        """The address for a ``RemoteStore``, or Agent Lightning's client."""
        return self._server.endpoint

    def start(self) -> StoreService:
        if self._unsubscribe is not None:
            raise ConfigError("the store service was started already")
        self._unsubscribe = self._store.subscribe_finished(self._add_end)
        self._store.served = True
        launcher = self._server.server_launcher
        launcher.serve_context = _cutting_stalled(lambda: launcher._uvicorn_server, self._stalled_s)
        run_blocking(self._server.start())
        return self

    def stop(self) -> None:
        """End the server; waiting readers get a last page. Safe to call twice."""
        if self._unsubscribe is None:
            return
        self._unsubscribe()
        self._store.served = False
        self._unsubscribe = None
        self.feed.close()
        self.cancellations.close()
        run_blocking(self._server.stop())

    def plan(self, step: int, rollout_ids: Sequence[str]) -> None:
        """Publish the plan of training step ``step``, one rollout of each group, for ``RemoteStore.planned``."""
        self._plans = {**dict(list(self._plans.items())[1 - _PLANS :]), step: list(rollout_ids)}

    def __enter__(self) -> StoreService:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _add_end(self, rollout: Rollout) -> None:
        self.feed.append(rollout)
        if rollout.status == "cancelled":
            self.cancellations.append(rollout)

    def _add_routes(self, token: str | None) -> None:
        app = self._server.app
        assert app is not None

        async def batch(request: Request) -> Response:
            return Response(await execute_batch(self._store, await _json(request)), media_type="application/json")

        # POST: the dashboard of Agent Lightning's server handles every GET
        app.post(FEED_PATH)(_pages_of(self.feed))
        app.post(CANCELLED_PATH)(_pages_of(self.cancellations))
        app.post(BATCH_PATH)(batch)

        async def plan(request: Request) -> list[str]:
            body = await _json(request)
            step = body.get("step") if isinstance(body, dict) else None
            if not isinstance(step, int) or (rollout_ids := self._plans.get(step)) is None:
                raise HTTPException(404, f"there is no plan for step {step!r:.40}")
            return rollout_ids

        app.post(PLAN_PATH)(plan)

        async def admit(request: Any, call_next: Any) -> Any:
            if token and not has_token(request.headers.get("authorization"), token):
                return _refusal(401, f"the store needs its token as a bearer token ({TOKEN_VARIABLE})")
            if (detail := page_refusal(request.headers, request.url.path, check_host=not token)) is not None:
                return _refusal(403, detail)
            if (detail := encoding_refusal(encoding := encoding_of(request.headers))) is not None:
                return _refusal(415, detail)
            received, receive = 0, request.receive

            async def bounded_receive() -> Any:  # Agent Lightning's routes read any size
                nonlocal received
                message = await receive()
                received += len(message.get("body", b""))
                return message if received <= _MAX_BODY else {"type": "http.disconnect"}

            request._receive = bounded_receive
            response = None
            try:
                refusal = await _decompress(request, encoding) if encoding != "identity" else None
                if request.url.path.startswith(_AGL_ROUTES):
                    refusal = refusal or await _unstorable(request)
                response = refusal or await call_next(request)
            except Exception:
                if received <= _MAX_BODY:
                    raise
            return response if received <= _MAX_BODY else _too_large()

        app.middleware("http")(admit)

        async def mistyped(request: Request, error: Any) -> JSONResponse:
            return _refusal(422, _first_problem(error))

        async def refused(request: Request, error: Any) -> JSONResponse:
            """Of an unknown id, say; Agent Lightning would answer 500 with a traceback, and its client would retry."""
            return _refusal(400, f"{type(error).__name__}: {error!s:.300}")

        app.add_exception_handler(RequestValidationError, mistyped)
        app.add_exception_handler(ValueError, refused)


async def _unstorable(request: Request) -> JSONResponse | None:
    """The refusal of a body that Agent Lightning's routes would store, and could then not write into an answer."""
    try:
        deep = await request.body() and is_too_deep(await _json(request))
        return _refusal(400, "the body is nested more than 250 deep") if deep else None
    except ClientDisconnect:
        return _refusal(400, _CUT_SHORT)
    except HTTPException as error:
        return _refusal(400, error.detail)


async def _decompress(request: Any, encoding: str) -> JSONResponse | None:
    """Replace the body, of which Agent Lightning reads gzip of any size; the refusal of a broken or large one."""
    try:
        body = await decompressed(await request.body(), encoding, most=_MAX_BODY)
    except (ClientDisconnect, ValueError) as error:
        return _refusal(400, f"the body cannot be read: {error or 'the connection ended'}")
    if body is None:
        return _too_large()
    request._body = body
    request.scope["headers"] = [pair for pair in request.scope["headers"] if pair[0] != b"content-encoding"]
    return None


def _too_large() -> JSONResponse:
    return _refusal(413, f"the body is larger than {_MAX_BODY} bytes; send less in one request")


def _refusal(status: int, detail: str) -> JSONResponse:
    return JSONResponse({"detail": detail}, status_code=status)


@contextmanager
def served(store: LightningStore, host: str = "127.0.0.1") -> Iterator[tuple[str, str | None]]:
    """Address and token of ``store`` for other processes: a ``BridgeStore`` is served on ``host`` within the block; a
    client has them already. Raises ``ConfigError`` for any other store."""
    if isinstance(store, LightningStoreClient):
        yield store.server_address_root, getattr(store, "_token", None)
    elif isinstance(store, BridgeStore):
        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
        with StoreService(store=store, host=host, token=token) as service:
            yield service.url, token
    else:
        kind = type(getattr(store, "store", store)).__name__  # a wrapper's own store
        raise ConfigError(f"other processes need a BridgeStore or a client of one, got a {kind}")


@asynccontextmanager
async def _cutting_stalled(server: Callable[[], Any], stalled_s: float) -> AsyncIterator[None]:
    """Cut stalled connections of a uvicorn server, which has no time limit for the first request, nor for bodies."""
    since: WeakKeyDictionary[Any, float] = WeakKeyDictionary()  # start of the current wait for data
    received: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # bytes since then

    def count(connection: Any) -> None:
        data_received = connection.data_received

        def counted(data: bytes) -> None:
            received[connection] += len(data)
            data_received(data)

        connection.data_received = counted

    def check(connection: Any, now: float) -> None:
        cycle = connection.cycle
        if cycle is not None and not (cycle.response_complete or cycle.more_body):  # the server is working
            since.pop(connection, None)
        elif connection not in since or received[connection] >= 1000 * stalled_s:
            since[connection] = now
            if connection not in received:
                count(connection)
            received[connection] = 0
        elif now - since[connection] >= stalled_s:
            connection.transport.abort()

    async def check_all() -> None:
        while True:
            await asyncio.sleep(stalled_s / 4)
            for connection in list(server().server_state.connections):
                check(connection, time.monotonic())

    checking = asyncio.ensure_future(check_all())
    try:
        yield
    finally:
        checking.cancel()


async def _json(request: Request) -> Any:
    """The body of a request, parsed in a thread if it is large. Raises ``HTTPException`` 400 if it is not JSON."""
    try:
        raw = await request.body()
        return orjson.loads(raw) if len(raw) <= INLINE_PARSE_BYTES else await run_in_thread(orjson.loads, raw)
    except ClientDisconnect as error:
        raise HTTPException(400, _CUT_SHORT) from error
    except orjson.JSONDecodeError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from error


class _Follower(BaseModel):
    """A request for a page of a feed: the reader's position, and how long to wait for a page."""

    server_instance_id: str = ""
    last: Annotated[int, Field(ge=0, alias="after")] = 0
    wait_s: Annotated[float, Field(ge=0)] = 0.0


def _pages_of(feed: FinishedFeed) -> Callable[[Request], Awaitable[FeedPage]]:
    async def pages(request: Request) -> FeedPage:
        try:
            follower = _Follower.model_validate(await _json(request))
        except ValidationError as error:
            raise HTTPException(400, _first_problem(error)) from error
        return await feed.wait(FeedPosition(follower.server_instance_id, follower.last), follower.wait_s)

    return pages


def _first_problem(error: ValidationError | RequestValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "the body"
    return f"{place:.99}: {first['msg']:.200}"


async def execute_batch(store: BridgeStore, body: Any) -> bytes:
    """Execute the calls of one request, in order; each result is a value or an error, which does not stop the others.
    Raises ``HTTPException`` 400 if the body has no list of calls."""
    if not isinstance(body, dict) or not isinstance(body.get("calls"), list):
        raise HTTPException(400, 'the body is not {"calls": [...]}')
    results: list[orjson.Fragment] = []
    for number, call in enumerate(body["calls"]):
        if number % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)
        try:
            results.append(_encoded({"result": await _execute(store, call)}))
        except Exception as error:  # returned to its caller
            refused = isinstance(error, (ValueError, TypeError, KeyError))
            results.append(_encoded({"error": f"{type(error).__name__}: {error}", "refused": refused}))
    return orjson.dumps({"results": results})


def _encoded(result: dict[str, Any]) -> orjson.Fragment:
    return orjson.Fragment(orjson.dumps(result, option=orjson.OPT_SERIALIZE_NUMPY))


async def _execute(store: BridgeStore, call: dict[str, Any]) -> Any:
    if call["op"] == "spans":
        spans: list[Span] = []
        async for chunk in _slices(call["spans"]):
            spans += [Span.model_validate(span) for span in chunk]
        async for chunk in _slices(spans):
            await _write(store, chunk)
        return [span.sequence_id for span in spans]
    if call["op"] == "attempt":
        if is_too_deep(call["fields"]):
            raise ValueError("the fields are nested more than 250 deep")
        attempt = await store.update_attempt(call["rollout_id"], call["attempt_id"], **call["fields"])
        return attempt.model_dump(mode="json")
    if call["op"] == "release":
        return await store.release(call["rollout_ids"])
    raise ValueError(f"there is no call {call['op']!r}")


async def _slices(items: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    for first in range(0, len(items), _SLICE):
        if first:
            await asyncio.sleep(0)
        yield items[first : first + _SLICE]


async def _write(store: BridgeStore, spans: Sequence[Span]) -> None:
    unnumbered = [span for span in spans if span.sequence_id == UNNUMBERED]
    keys = [(span.rollout_id, span.attempt_id) for span in unnumbered]
    for span, number in zip(unnumbered, await store.get_many_span_sequence_ids(keys), strict=True):
        span.sequence_id = number
    await store.add_many_spans(spans)
