"""A store that other processes reach over HTTP, and that tells them which rollouts have ended.

Stock Agent Lightning can be asked for finished rollouts only by a walk through every rollout ever stored, or by waiting
for named ids. ``StoreService`` serves a ``BridgeStore`` with Agent Lightning's own server and adds one route to it:
``POST /agl_slime/v1/finished`` with ``{"epoch", "after", "wait_s"}`` answers with the ids of the rollouts that ended
after position ``after``, as soon as there are any, so following a store costs the same however long it has lived.
``POST /agl_slime/v1/cancelled`` is the same for those that ended as cancelled: what runners elsewhere follow, who need
not hear of any other end. ``RemoteStore`` is Agent Lightning's client with these routes. A further route takes many
calls of a runner at once; see ``agl_slime.store.batch``.

Delivery is at least once. A position is a number within an *epoch*, the life of one server; the last 100,000 ends are
kept, and the last 10,000 that are cancellations. A follower that comes with another epoch, or from too far behind, is
told so and looks through the store once.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import socket
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
from typing_extensions import TypedDict

from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LightningStoreClient, LightningStoreServer, Rollout

logger = logging.getLogger(__name__)

FEED_PATH = "/agl_slime/v1/finished"
CANCELLED_PATH = "/agl_slime/v1/cancelled"

_WINDOW = 100_000
_CANCELLED_WINDOW = 10_000
_PAGE = 10_000
_LONGEST_WAIT_S = 60.0
# A server that restarts is back within moments; one that is gone for this long will not come back.
_UNREACHABLE_S = 120.0


class FeedPage(TypedDict):
    """``rollout_ids`` ended at positions ``last - len + 1`` to ``last``. ``missed``: ends before the first of them are
    no longer known."""

    epoch: str
    last: int
    rollout_ids: list[str]
    missed: bool


@dataclass(slots=True)
class FeedPosition:
    """Where a follower stands: the number of ends it has taken in, within an epoch."""

    epoch: str = ""
    after: int = 0


class FinishedFeed:
    """The ends of a store's rollouts, or those of one kind, numbered from 1 in the order in which they happened.
    Thread-safe."""

    def __init__(self, *, window: int = _WINDOW) -> None:
        self.epoch = uuid.uuid4().hex
        self._ids: deque[str] = deque(maxlen=window)
        self._last = 0
        self._lock = threading.Lock()
        self._waiters: set[Callable[[], None]] = set()
        self._closed = False

    def append(self, rollout: Rollout) -> None:
        """A rollout has ended."""
        with self._lock:
            self._ids.append(rollout.rollout_id)
            self._last += 1
            waiters = list(self._waiters)
        for wake in waiters:
            wake()

    def read(self, position: FeedPosition) -> FeedPage:
        """What ended after ``position``, up to a page."""
        with self._lock:
            first = self._last - len(self._ids) + 1
            after = position.after if position.epoch == self.epoch and position.after <= self._last else 0
            begin = max(after + 1, first)
            end = min(self._last, begin + _PAGE - 1)
            ids = [self._ids[i - first] for i in range(begin, end + 1)]
            return FeedPage(epoch=self.epoch, last=end, rollout_ids=ids, missed=begin > after + 1)

    async def wait(self, position: FeedPosition, timeout_s: float) -> FeedPage:
        """``read``, as soon as there is something to read; an empty page after ``timeout_s``."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def wake() -> None:
            try:
                loop.call_soon_threadsafe(ended.set)
            except RuntimeError:  # the follower's loop is gone, and the follower with it
                logger.debug("A follower of the feed is gone.")

        with self._lock:
            self._waiters.add(wake)
        try:
            page = self.read(position)
            if not page["rollout_ids"] and page["epoch"] == position.epoch and not self._closed:
                try:
                    await asyncio.wait_for(ended.wait(), timeout=min(timeout_s, _LONGEST_WAIT_S))
                except asyncio.TimeoutError:
                    return page
                page = self.read(position)
            return page
        finally:
            with self._lock:
                self._waiters.discard(wake)

    def close(self) -> None:
        """Let everyone who waits go."""
        with self._lock:
            self._closed = True
            waiters = list(self._waiters)
        for wake in waiters:
            wake()


class StoreService:
    """Serves a ``BridgeStore`` and its feed over HTTP, from ``start`` (or the ``with`` block) to ``stop``.

    Args:
        store: the store of this process; its other users go on using it directly.
        host: the address to bind. Anything but a loopback address needs ``token``, which every request must then carry
            as a bearer token.
        port: 0 takes a free one.
    """

    def __init__(self, *, store: BridgeStore, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> None:
        if not token and not _is_loopback(host):
            raise ConfigError(
                f"serving the store on {host} needs a token (AGL_SLIME_STORE_TOKEN): everyone who reaches it could read and write rollouts"
            )
        from agentlightning.utils.server_launcher import PythonServerLauncherArgs

        self.feed = FinishedFeed()
        self.cancellations = FinishedFeed(window=_CANCELLED_WINDOW)
        self._store = store
        access_host = "127.0.0.1" if _is_loopback(host) else host
        arguments = PythonServerLauncherArgs(
            host=host,
            port=port or _free_port(host),
            access_host=None
            if host == "0.0.0.0"
            else access_host,  # unspecified: Agent Lightning finds the address that others see
            launch_mode="thread",
            healthcheck_url=None,  # the launcher's own check carries no token
            log_level=logging.WARNING,
        )
        self._server = LightningStoreServer(store=store, launcher_args=arguments)
        self._add_routes(token)
        self._unsubscribe: Callable[[], None] | None = None

    @property
    def url(self) -> str:
        """What a ``RemoteStore`` (or Agent Lightning's client) connects to."""
        return self._server.endpoint

    def start(self) -> StoreService:
        if self._unsubscribe is not None:
            raise ConfigError("the store service was started already")
        self._unsubscribe = self._store.subscribe_finished(self._take)
        _run_elsewhere(self._server.start)
        return self

    def stop(self) -> None:
        """End the server; followers get what there is and are let go. Safe to call twice."""
        if self._unsubscribe is None:
            return
        self._unsubscribe()
        self._unsubscribe = None
        self.feed.close()
        self.cancellations.close()
        _run_elsewhere(self._server.stop)

    def __enter__(self) -> StoreService:
        return self.start()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    def _take(self, rollout: Rollout) -> None:
        self.feed.append(rollout)
        if rollout.status == "cancelled":
            self.cancellations.append(rollout)

    def _add_routes(self, token: str | None) -> None:
        from fastapi import Request
        from fastapi.responses import JSONResponse, Response

        from agl_slime.store.batch import BATCH_PATH, execute_batch  # builds on the client below

        app = self._server.app
        assert app is not None

        async def finished(request: dict[str, Any]) -> FeedPage:
            return await _answer(self.feed, request)

        async def cancelled(request: dict[str, Any]) -> FeedPage:
            return await _answer(self.cancellations, request)

        async def batch(request: Any) -> Response:
            return Response(await execute_batch(self._store, await request.body()), media_type="application/json")

        batch.__annotations__["request"] = Request  # postponed annotations hide it from FastAPI
        # POST: the dashboard of Agent Lightning's server answers every GET
        app.post(FEED_PATH)(finished)
        app.post(CANCELLED_PATH)(cancelled)
        app.post(BATCH_PATH)(batch)
        if token:
            expected = f"Bearer {token}"

            async def authorize(request: Any, call_next: Any) -> Any:
                if not hmac.compare_digest(request.headers.get("authorization", "").encode(), expected.encode()):
                    return JSONResponse(
                        {"detail": "the store needs its token as a bearer token (AGL_SLIME_STORE_TOKEN)"},
                        status_code=401,
                    )
                return await call_next(request)

            app.middleware("http")(authorize)


class RemoteStore(LightningStoreClient):
    """Agent Lightning's HTTP client for a store that a ``StoreService`` serves."""

    def __init__(self, url: str, *, token: str | None = None, **kwargs: Any) -> None:
        super().__init__(url, **kwargs)
        self._token = token

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_token": self._token}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._token = state["_token"]

    async def _get_session(self) -> aiohttp.ClientSession:
        session = await super()._get_session()
        if self._token:
            session.headers["Authorization"] = f"Bearer {self._token}"
        return session

    async def release(self, rollout_ids: Sequence[str]) -> int:
        """As ``BridgeStore.release``, over HTTP."""
        from agl_slime.store.batch import call_once

        return await call_once(self, {"op": "release", "rollout_ids": list(rollout_ids)})

    def follow_finished(self, position: FeedPosition, *, wait_s: float = 20.0) -> AsyncIterator[FeedPage]:
        """Pages of ended rollouts from ``position`` on, for ever.

        Goes on after interruptions; raises ``DataSourceError`` when the store has been unreachable for two minutes, or
        serves no feed. The caller moves the position.
        """
        return self._follow(FEED_PATH, position, wait_s=wait_s, patience_s=_UNREACHABLE_S)

    def follow_cancelled(self, position: FeedPosition, *, wait_s: float = 20.0) -> AsyncIterator[FeedPage]:
        """Pages of cancelled rollouts from ``position`` on, for ever, however long the store is away meanwhile.

        Raises ``DataSourceError`` when the store tells of no cancellations. The caller moves the position.
        """
        return self._follow(CANCELLED_PATH, position, wait_s=wait_s, patience_s=None)

    async def _follow(
        self, path: str, position: FeedPosition, *, wait_s: float, patience_s: float | None
    ) -> AsyncIterator[FeedPage]:
        session = await self._get_session()
        loop = asyncio.get_running_loop()
        unreachable_since: float | None = None
        pause_s = 0.1
        while True:
            payload = {"epoch": position.epoch, "after": position.after, "wait_s": wait_s}
            try:
                timeout = aiohttp.ClientTimeout(total=wait_s + 10.0)
                async with session.post(self.server_address_root + path, json=payload, timeout=timeout) as response:
                    if response.status in (401, 404, 405):
                        raise DataSourceError(
                            f"the store at {self.server_address_root} answers {response.status} to {path}: "
                            + (
                                "its token is needed (AGL_SLIME_STORE_TOKEN)"
                                if response.status == 401
                                else "serve it with agl_slime's StoreService"
                            )
                        )
                    response.raise_for_status()
                    page: FeedPage = await response.json()
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                now = loop.time()
                unreachable_since = now if unreachable_since is None else unreachable_since
                if patience_s is not None and now - unreachable_since > patience_s:
                    raise DataSourceError(
                        f"the store at {self.server_address_root} has not answered for {patience_s:g} s: {error}"
                    ) from error
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
                continue
            unreachable_since, pause_s = None, 0.1
            if page["rollout_ids"] or page["missed"] or page["epoch"] != position.epoch:
                yield page


async def _answer(feed: FinishedFeed, request: dict[str, Any]) -> FeedPage:
    position = FeedPosition(str(request.get("epoch", "")), int(request.get("after", 0)))
    return await feed.wait(position, float(request.get("wait_s", 0.0)))


def _run_elsewhere(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``work`` to its end on an event loop in another thread: the caller may have a running loop of its own."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: asyncio.run(work())).result()


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        return listener.getsockname()[1]


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
