"""Clients of a store that a ``StoreService`` serves: ``RemoteStore`` for readers, ``WorkerStore`` for runners.

Agent Lightning's client sends a request (a millisecond of the server's time) for each span, for its number, and for
each change of an attempt. A runner's calls that end rollouts are batched: calls made while a request is in flight, or
within ten milliseconds of the last request's start, form the next one. Each caller still waits for its result.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from functools import partial
from typing import Any

import aiohttp
import orjson

from agl_slime.errors import AglSlimeError, ConfigError, DataSourceError
from agl_slime.store.bridge import FINISHED, BridgeStore
from agl_slime.store.feed import CANCELLED_PATH, FEED_PATH, FeedPage, FeedPosition
from agl_slime.store.server import BATCH_PATH, PLAN_PATH, TOKEN_VARIABLE, UNNUMBERED
from agl_slime.support.agl import Attempt, LightningStore, LightningStoreClient, ResourcesUpdate, Rollout, Span
from agl_slime.support.backoff import Backoff
from agl_slime.support.batching import Batcher
from agl_slime.support.http import is_transient, request_json
from agl_slime.support.net import shown_url

# A restarting server answers again within moments; one that does not answer for this long has failed.
_UNREACHABLE_S = 120.0
_LARGEST_BATCH = 256
_LARGEST_BODY = 32 * 2**20  # bytes; one more call may exceed it
_REQUESTS_AT_ONCE = 2
# A request costs the server several times as much as a call in it. The first one after a pause is sent at once.
_BETWEEN_REQUESTS_S = 0.01
_RESOURCES_TTL_S = 1.0

logger = logging.getLogger(__name__)


class RemoteStore(LightningStoreClient):
    """Agent Lightning's HTTP client for a store that a ``StoreService`` serves."""

    def __init__(self, url: str, *, token: str | None = None, **kwargs: Any) -> None:
        if token and "@" in url:
            shown = shown_url(url)
            raise ConfigError(f"{shown} has a user or password, and there is a token: a request has one of them")
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

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | None:
        """The rollout; ``None`` if it does not exist, and not, as Agent Lightning's client, if no store answers."""
        data = await self._request_json("get", f"/rollouts/{rollout_id}")
        return Rollout.model_validate(data) if data is not None else None

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        data = await self._request_json("get", f"/rollouts/{rollout_id}/attempts/latest")
        return Attempt.model_validate(data) if data else None

    async def release(self, rollout_ids: Sequence[str]) -> int:
        """``BridgeStore.release`` over HTTP."""
        call = {"op": "release", "rollout_ids": list(rollout_ids)}
        [result] = await self._post_calls([_encoded(call)])
        return _result_of(result)

    async def follow_finished(
        self,
        position: FeedPosition,
        *,
        only_cancelled: bool = False,
        wait_s: float = 20.0,
        patience_s: float | None = _UNREACHABLE_S,
    ) -> AsyncIterator[FeedPage]:
        """Endless pages of ended rollouts after ``position``, which the caller moves; retries across interruptions.
        Raises ``DataSourceError`` when no store answers for ``patience_s`` (``None``: no limit), or it has no feed."""
        path, backoff = CANCELLED_PATH if only_cancelled else FEED_PATH, self._backoff(patience_s)
        while True:
            body = {"server_instance_id": position.server_instance_id, "after": position.last, "wait_s": wait_s}
            post = partial(self._fetch_page, path, orjson.dumps(body), timeout_s=wait_s + 10.0)
            try:
                # an answer that is not a page comes from something in front of the store, such as a proxy: retry
                page = await backoff.run(post, lambda error: is_transient(error) or isinstance(error, ValueError))
            except aiohttp.ClientResponseError as error:
                fix = f"set {TOKEN_VARIABLE}" if error.status == 401 else "serve it with agl_slime's StoreService"
                url = shown_url(self.server_address_root)
                raise DataSourceError(f"the store at {url} answers {error.status} to {path}: {fix}") from error
            if page["rollout_ids"] or page["missed"] or page["server_instance_id"] != position.server_instance_id:
                yield page

    async def _fetch_page(self, path: str, body: bytes, *, timeout_s: float) -> FeedPage:
        answer = await self._post(path, body, timeout_s=timeout_s)
        if not isinstance(answer, dict) or not answer.keys() >= FeedPage.__required_keys__:
            raise ValueError(f"{self.server_address_root}{path} did not answer with a page of a feed")
        return FeedPage(**answer)

    async def statuses(self, rollout_ids: Collection[str]) -> dict[str, str]:
        """The status by id of ``rollout_ids``, without unknown ones; retries while the store is unreachable."""
        query = partial(self.query_rollouts, rollout_id_in=sorted(rollout_ids))
        rollouts = await self._backoff(None).run(query, is_transient)
        return {rollout.rollout_id: rollout.status for rollout in rollouts}

    async def planned(self, step: int) -> list[str]:
        """The plan of training step ``step``: one rollout of each of its groups (``StoreService.plan``)."""
        body = orjson.dumps({"step": step})
        try:
            return await self._backoff(_UNREACHABLE_S).run(lambda: self._post(PLAN_PATH, body), is_transient)
        except aiohttp.ClientResponseError as error:
            problem = f"the store has no plan for step {step} ({error.status})"
            raise DataSourceError(f"{problem}: ask for steps in order") from error

    async def _post_calls(self, calls: list[bytes]) -> list[dict[str, Any]]:
        # safe to retry: the store adds no span twice, and an end is final
        body = orjson.dumps({"calls": [orjson.Fragment(call) for call in calls]})
        answer = await self._backoff(_UNREACHABLE_S).run(lambda: self._post(BATCH_PATH, body), is_transient)
        return answer["results"]

    async def _post(self, path: str, body: bytes, *, timeout_s: float = 300.0) -> Any:
        session, timeout = await self._get_session(), aiohttp.ClientTimeout(total=timeout_s)
        return await request_json(session, self.server_address_root + path, body, timeout=timeout)

    def _backoff(self, patience_s: float | None) -> Backoff:
        message = f"the store at {self.server_address_root} does not answer"
        return Backoff(message, DataSourceError, base_s=0.1, patience_s=patience_s)


def _encoded(call: dict[str, Any]) -> bytes:
    return orjson.dumps(call, option=orjson.OPT_SERIALIZE_NUMPY)


def _result_of(answer: dict[str, Any]) -> Any:
    if "error" in answer:
        raise ValueError(answer["error"]) if answer["refused"] else RuntimeError(answer["error"])
    return answer["result"]


class WorkerStore(RemoteStore):
    """The store of a runner in another process, used on one event loop: ends of rollouts travel in batches, resources
    are fetched once a second at most."""

    def __init__(self, url: str, *, token: str | None = None) -> None:
        super().__init__(url, token=token)
        limits: dict[str, Any] = {"most": _LARGEST_BATCH, "size": len, "most_size": _LARGEST_BODY}
        limits |= {"parallel": _REQUESTS_AT_ONCE, "between_s": _BETWEEN_REQUESTS_S}
        self._calls = Batcher(self._post_calls, **limits)
        self._resources: dict[str, asyncio.Future[ResourcesUpdate | None]] = {}

    async def _call(self, call: dict[str, Any]) -> Any:
        # encoded here, so that a call that cannot be encoded fails alone
        return _result_of(await self._calls.add(_encoded(call)))

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        return UNNUMBERED  # the store numbers spans when they arrive, in the order in which they are written

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        return [UNNUMBERED] * len(rollout_attempt_ids)

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        numbers = await self._call({"op": "spans", "spans": [span.model_dump(mode="json") for span in spans]})
        return [span.model_copy(update={"sequence_id": number}) for span, number in zip(spans, numbers, strict=True)]

    async def add_span(self, span: Span) -> Span | None:
        [written] = await self.add_many_spans([span])
        return written

    async def update_attempt(self, rollout_id: str, attempt_id: str, **fields: Any) -> Attempt:  # type: ignore[override]  # by keyword, as all do
        call = {"op": "attempt", "rollout_id": rollout_id, "attempt_id": attempt_id, "fields": fields}
        return Attempt.model_validate(await self._call(call))

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        # one request for the hundreds of rollouts that begin together
        fetch = self._resources.get(resources_id)
        if fetch is None:
            fetch = self._resources[resources_id] = asyncio.ensure_future(super().get_resources_by_id(resources_id))
            fetch.add_done_callback(partial(self._forget_soon, resources_id))
        return await asyncio.shield(fetch)

    def _forget_soon(self, resources_id: str, fetch: asyncio.Future[ResourcesUpdate | None]) -> None:
        failed = fetch.cancelled() or fetch.exception() is not None
        after_s = 0.0 if failed else _RESOURCES_TTL_S
        asyncio.get_running_loop().call_later(after_s, self._resources.pop, resources_id, None)


async def follow_feed(
    store: RemoteStore,
    position: FeedPosition,
    take: Callable[[FeedPage, Collection[str]], None],
    catch_up: Callable[[FeedPage], Awaitable[Collection[str]]],
    *,
    only_cancelled: bool = False,
    patience_s: float | None = None,
) -> None:
    """Call ``take`` with each page of a store's feed, without end, and move the position behind it. ``catch_up``
    returns the rollouts that may have ended unseen, if a page has missed ends or comes from another server instance."""
    async for page in store.follow_finished(position, only_cancelled=only_cancelled, patience_s=patience_s):
        missed = await catch_up(page) if page["missed"] or position.restarted(page) else ()
        take(page, missed)
        position.move(page)


def listen_for_ends(
    store: LightningStore,
    notify: Callable[[str], None],
    *,
    own_rollouts: Callable[[], Collection[str]],
    only_cancelled: bool = False,
) -> Callable[[], object]:
    """Call ``notify(rollout_id)`` for each rollout that ends in the store from now on, or is cancelled there. Calls may
    repeat, come on any thread, and concern other listeners' rollouts. The returned function unsubscribes.
    ``own_rollouts`` returns this listener's rollouts, whose status is looked up after an interruption of a remote
    store's feed. Does nothing for stores without notifications."""
    if isinstance(store, BridgeStore):

        def ended(rollout: Rollout) -> None:
            if rollout.status == "cancelled" or not only_cancelled:
                notify(rollout.rollout_id)

        return store.subscribe_finished(ended)
    if not isinstance(store, RemoteStore):
        return lambda: None

    def take(page: FeedPage, missed: Collection[str]) -> None:
        for rollout_id in {*page["rollout_ids"], *missed}:
            notify(rollout_id)

    async def catch_up(page: FeedPage) -> Collection[str]:
        ids = {*own_rollouts()}
        statuses = await store.statuses(ids) if ids else {}
        if only_cancelled:
            return {name for name, status in statuses.items() if status == "cancelled"}
        return ids - {name for name, status in statuses.items() if status not in FINISHED}

    async def follow() -> None:
        try:
            await follow_feed(store, FeedPosition(), take, catch_up, only_cancelled=only_cancelled)
        except (AglSlimeError, aiohttp.ClientError) as error:
            kind = "cancellations" if only_cancelled else "ends of rollouts"
            logger.warning("The store's %s are no longer followed: %s", kind, error)

    return asyncio.ensure_future(follow()).cancel
