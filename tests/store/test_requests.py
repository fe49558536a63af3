"""The answers of a served store to foreign requests: web pages and junk."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import RemoteStore
from agl_slime.store.feed import CANCELLED_PATH, FEED_PATH, FeedPosition
from agl_slime.store.server import BATCH_PATH, StoreService, execute_batch
from agl_slime.support.http import listening
from tests.harness.examples import examples

ENQUEUE = "/v1/agl/queues/rollouts/enqueue"
JUNK = [b"", b"{", b"[]", b"7", b'"x"', b"null", b"\xff\xfe", b"[" * 100_000, b'{"after": ' + b"[" * 2_000]


async def post(url: str, path: str, body: bytes, **headers: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session:
        sent = {"Content-Type": "application/json", **headers}
        async with session.post(url + path, data=body, headers=sent) as answer:
            return answer.status, await answer.text()


FOREIGN = [
    *({"Origin": origin} for origin in ("http://evil.example", "null")),
    *({"Host": host} for host in ("evil.example", "evil.example:4748", "[::1")),
]


@pytest.mark.parametrize("path", [ENQUEUE, BATCH_PATH, FEED_PATH])
async def test_a_web_page_cannot_reach_a_store_without_a_token(path: str):
    with StoreService(store=BridgeStore()) as service:
        for headers in FOREIGN:
            status, text = await post(service.url, path, b'{"calls": []}', **headers)
            assert status == 403, text
            assert "web pages" in text or "127.0.0.1" in text
        for host in ("localhost:1", "127.0.0.1", "[::1]:80"):
            assert (await post(service.url, FEED_PATH, b"{}", Host=host))[0] == 200


async def test_with_a_token_the_token_decides():
    with StoreService(store=BridgeStore(), token="secret") as service:
        headers = {"Host": "trainer.cluster:4747", "Authorization": "Bearer secret"}
        assert (await post(service.url, FEED_PATH, b"{}", **headers))[0] == 200
        assert (await post(service.url, FEED_PATH, b"{}"))[0] == 401


@pytest.mark.parametrize("path", [BATCH_PATH, FEED_PATH, CANCELLED_PATH])
async def test_junk_is_a_400_and_no_traceback(path: str, caplog: pytest.LogCaptureFixture):
    with StoreService(store=BridgeStore()) as service:
        for body in JUNK:
            status, text = await post(service.url, path, body)
            assert status == 400, (body[:12], text)
            assert "detail" in text
        assert (await post(service.url, FEED_PATH, b"{}"))[0] == 200
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.fixed_dictionaries(
    {"op": st.sampled_from(["spans", "attempt", "release", "no such"]) | ANY_JSON},
    optional=dict.fromkeys(("spans", "rollout_id", "attempt_id", "fields", "rollout_ids"), ANY_JSON),
)
BODIES = st.one_of(
    ANY_JSON,
    st.fixed_dictionaries({"calls": st.lists(CALLS | ANY_JSON, max_size=3) | ANY_JSON}),
    st.fixed_dictionaries({"server_instance_id": ANY_JSON, "after": ANY_JSON, "wait_s": st.none() | st.text()}),
)


async def test_every_answer_is_typed():
    bodies: list[bytes] = []

    @settings(max_examples=examples(150), deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(BODIES)
    def draw(body: object) -> None:
        bodies.append(json.dumps(body).encode())

    draw()
    with StoreService(store=BridgeStore()) as service:
        for body in bodies:
            for path in (BATCH_PATH, FEED_PATH):
                status, text = await post(service.url, path, body)
                assert status in (200, 400), (path, body, text)


async def test_follower_survives_a_proxys_answers_while_the_store_is_down():
    """A proxy's page, with status 200, and JSON that is no page of a feed."""

    feed = {"server_instance_id": "one", "last": 1, "rollout_ids": ["r"], "missed": False}
    answers = [web.Response(text="<html>back soon"), web.json_response({"hello": 1}), web.json_response(feed)]

    async def answer(_: web.Request) -> web.Response:
        return answers.pop(0)

    app = web.Application()
    app.router.add_post(FEED_PATH, answer)
    async with listening(app, host="127.0.0.1", port=0, backlog=8) as url:
        remote = RemoteStore(url)
        async for page in remote.follow_finished(FeedPosition()):
            assert page["rollout_ids"] == ["r"]
            break
        await remote.close()


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", [BATCH_PATH, FEED_PATH, ENQUEUE])
async def test_a_body_over_the_limit_is_a_413(path: str, chunked: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agl_slime.store.server._MAX_BODY", 100_000)
    body = b'{"calls": [' + b" " * 200_000 + b"]}"

    async def chunks() -> AsyncIterator[bytes]:
        for first in range(0, len(body), 50_000):
            yield body[first : first + 50_000]

    with StoreService(store=BridgeStore()) as service:
        async with aiohttp.ClientSession() as session:
            sent = {"Content-Type": "application/json"}
            async with session.post(service.url + path, data=chunks() if chunked else body, headers=sent) as answer:
                assert (answer.status, "100000 bytes" in await answer.text()) == (413, True)
        assert (await post(service.url, BATCH_PATH, b'{"calls": []}'))[0] == 200


@pytest.mark.parametrize("spans_of_a_call", [1, pytest.param(60_000, marks=pytest.mark.slow)])
async def test_requests_are_served_while_a_large_batch_is_executed(
    spans_of_a_call: int, monkeypatch: pytest.MonkeyPatch
):
    """Calls that name no attempt: each is refused, and costs what it costs to read its spans."""
    span = {"rollout_id": "r", "attempt_id": "a", "sequence_id": 1, "trace_id": "t", "span_id": "s", "name": "n"}
    span |= {"status": {"status_code": "OK"}, "resource": {"attributes": {}, "schema_url": ""}, "attributes": {}}
    span |= dict.fromkeys(("parent_id", "context", "parent", "start_time", "end_time")) | {"events": [], "links": []}
    calls = [{"op": "spans", "spans": [span] * spans_of_a_call}] * max(1, 8_000 // spans_of_a_call)
    executing, ended, served = threading.Event(), asyncio.Event(), 0

    async def noted(store: BridgeStore, body: object) -> bytes:
        executing.set()
        try:
            return await execute_batch(store, body)
        finally:
            executing.clear()

    monkeypatch.setattr("agl_slime.store.server.execute_batch", noted)
    with StoreService(store=BridgeStore()) as service:

        async def look() -> None:
            nonlocal served
            while not ended.is_set():
                started = executing.is_set()
                assert (await post(service.url, FEED_PATH, b"{}"))[0] == 200
                served += started and executing.is_set()

        looking = asyncio.ensure_future(look())
        status, text = await post(service.url, BATCH_PATH, json.dumps({"calls": calls}).encode())
        ended.set()
        await looking
    assert (status, len(json.loads(text)["results"])) == (200, len(calls))
    assert served >= 3
