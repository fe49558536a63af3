"""Many store calls in one HTTP request.

Agent Lightning's client needs a request per span, one more for the number of each, and one per change of an attempt,
about a millisecond of the server's time each. Here the calls that end a rollout, of all rollouts that end at the same
time, travel together in ``POST /agl_slime/v1/batch``: what comes while a request is under way, or within ten
milliseconds of the last one's start, makes up the next one. A caller waits for its own result as before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson

from agl_slime.store.bridge import BridgeStore
from agl_slime.store.feed import RemoteStore
from agl_slime.support.agl import Attempt, LightningStore, ResourcesUpdate, Span

logger = logging.getLogger(__name__)

BATCH_PATH = "/agl_slime/v1/batch"

# A span with this number gets the next of its rollout when it is written.
_UNNUMBERED = 0
_LARGEST_BATCH = 256
_REQUESTS_AT_ONCE = 2
# A request costs the server several times what a call in it costs. The first one after a pause goes at once.
_BETWEEN_REQUESTS_S = 0.01
_RETRY_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_RESOURCES_TTL_S = 1.0
_RESOURCES_CACHED = 64


# -- server ----------------------------------------------------------------------------------------------------------


async def execute_batch(store: LightningStore, body: bytes) -> bytes:
    """Execute the calls of one request, in order; a call that fails says so and does not stop the others."""
    results: list[dict[str, Any]] = []
    for call in orjson.loads(body)["calls"]:
        try:
            results.append({"result": await _execute(store, call)})
        except Exception as error:  # told to the one who called
            results.append(
                {
                    "error": f"{type(error).__name__}: {error}",
                    "refused": isinstance(error, (ValueError, TypeError, KeyError)),
                }
            )
    return orjson.dumps({"results": results}, option=orjson.OPT_SERIALIZE_NUMPY)


async def _execute(store: LightningStore, call: dict[str, Any]) -> Any:
    if call["op"] == "spans":
        spans = [Span.model_validate(span) for span in call["spans"]]
        keys = [(span.rollout_id, span.attempt_id) for span in spans if span.sequence_id == _UNNUMBERED]
        numbers = iter(await store.get_many_span_sequence_ids(keys))
        for span in spans:
            if span.sequence_id == _UNNUMBERED:
                span.sequence_id = next(numbers)
        await store.add_many_spans(spans)
        return [span.sequence_id for span in spans]
    if call["op"] == "attempt":
        attempt = await store.update_attempt(call["rollout_id"], call["attempt_id"], **call["fields"])
        return attempt.model_dump(mode="json")
    if call["op"] == "release":
        if not isinstance(store, BridgeStore):
            raise TypeError(f"a {type(store).__name__} does not release rollouts")
        return await store.release(call["rollout_ids"])
    raise ValueError(f"there is no call {call['op']!r}")


# -- client ----------------------------------------------------------------------------------------------------------


class _Batcher:
    """Gathers the calls of one event loop and sends them."""

    def __init__(self, store: RemoteStore) -> None:
        self._store = store
        self._waiting: list[tuple[dict[str, Any], asyncio.Future[Any]]] = []
        self._senders: set[asyncio.Task[None]] = set()
        self._next_start = 0.0

    async def call(self, call: dict[str, Any]) -> Any:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((call, future))
        if len(self._senders) < _REQUESTS_AT_ONCE:
            sender = asyncio.ensure_future(self._send())
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return await future

    async def _send(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            if (pause := self._next_start - loop.time()) > 0:
                await asyncio.sleep(pause)
                continue
            self._next_start = loop.time() + _BETWEEN_REQUESTS_S
            batch, self._waiting = self._waiting[:_LARGEST_BATCH], self._waiting[_LARGEST_BATCH:]
            try:
                results = await self._post([call for call, _ in batch])
            except BaseException as error:  # everyone who waits must hear of it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(
                            error if isinstance(error, Exception) else ConnectionError("the store's client was closed")
                        )
                if not isinstance(error, Exception):
                    raise
                continue
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():
                    continue  # its rollout was cancelled meanwhile
                if "error" in result:
                    future.set_exception(
                        ValueError(result["error"]) if result["refused"] else RuntimeError(result["error"])
                    )
                else:
                    future.set_result(result["result"])

    async def _post(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        body = orjson.dumps({"calls": calls}, option=orjson.OPT_SERIALIZE_NUMPY)
        session = await self._store._get_session()
        delays = iter(_RETRY_DELAYS_S)
        while True:
            try:
                async with session.post(
                    self._store.server_address_root + BATCH_PATH,
                    data=body,
                    headers={"Content-Type": "application/json"},
                ) as response:
                    response.raise_for_status()
                    return orjson.loads(await response.read())["results"]
            except (aiohttp.ClientError, asyncio.TimeoutError) as error:
                # Sent twice is as good as once: a span that is there already is not added again, an end that is there
                # stays.
                if isinstance(error, aiohttp.ClientResponseError) and error.status < 500:
                    raise
                delay = next(delays, None)
                if delay is None:
                    raise
                logger.debug("The store did not answer (%s); trying again in %g s.", error, delay)
                await asyncio.sleep(delay)


async def call_once(store: RemoteStore, call: dict[str, Any]) -> Any:
    """One call in a request of its own."""
    return await _Batcher(store).call(call)


class WorkerStore(RemoteStore):
    """The store of a runner in another process: ends of rollouts travel in batches, resources are fetched once a second
    at most."""

    def __init__(self, url: str, *, token: str | None = None, **kwargs: Any) -> None:
        super().__init__(url, token=token, **kwargs)
        self._reset()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()

    def _reset(self) -> None:
        self._batchers: dict[asyncio.AbstractEventLoop, _Batcher] = {}
        self._resources: OrderedDict[str, tuple[float, ResourcesUpdate]] = OrderedDict()
        self._fetching: dict[tuple[asyncio.AbstractEventLoop, str], asyncio.Future[ResourcesUpdate | None]] = {}

    def _batcher(self) -> _Batcher:
        loop = asyncio.get_running_loop()
        batcher = self._batchers.get(loop)
        if batcher is None:
            batcher = self._batchers[loop] = _Batcher(self)
        return batcher

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Always 0: the store numbers the span when it arrives."""
        return _UNNUMBERED

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> Sequence[int]:
        """Zeros: the store numbers spans when they arrive, in the order in which they are written."""
        return [_UNNUMBERED] * len(rollout_attempt_ids)

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        numbers = await self._batcher().call({"op": "spans", "spans": [span.model_dump(mode="json") for span in spans]})
        return [span.model_copy(update={"sequence_id": number}) for span, number in zip(spans, numbers, strict=True)]

    async def add_span(self, span: Span) -> Span | None:
        [written] = await self.add_many_spans([span])
        return written

    async def update_attempt(self, rollout_id: str, attempt_id: str, **fields: Any) -> Attempt:  # type: ignore[override]  # by keyword, as all do
        call = {"op": "attempt", "rollout_id": rollout_id, "attempt_id": attempt_id, "fields": fields}
        return Attempt.model_validate(await self._batcher().call(call))

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        known = self._resources.get(resources_id)
        if known is not None and time.monotonic() - known[0] < _RESOURCES_TTL_S:
            return known[1]
        # hundreds of rollouts that begin together ask together: one request for all
        key = asyncio.get_running_loop(), resources_id
        fetching = self._fetching.get(key)
        if fetching is None:
            fetching = self._fetching[key] = asyncio.ensure_future(self._fetch_resources(resources_id))
            fetching.add_done_callback(lambda _: self._fetching.pop(key, None))
        return await asyncio.shield(fetching)

    async def _fetch_resources(self, resources_id: str) -> ResourcesUpdate | None:
        update = await super().get_resources_by_id(resources_id)
        if update is not None:
            self._resources[resources_id] = (time.monotonic(), update)
            if len(self._resources) > _RESOURCES_CACHED:
                self._resources.popitem(last=False)
        return update


__all__ = ["BATCH_PATH", "WorkerStore", "call_once", "execute_batch"]
