"""A served store over real HTTP: batched calls against calls in process, its feed, and answers to foreign requests."""

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.store import client, server
from agl_slime.store.bridge import BridgeStore, check_sendable
from agl_slime.store.client import RemoteStore, WorkerStore
from agl_slime.store.feed import CANCELLED_PATH, FEED_PATH, FeedPosition, FinishedFeed
from agl_slime.store.recording import Recording
from agl_slime.store.server import BATCH_PATH, TOKEN_VARIABLE, StoreService, execute_batch, served
from agl_slime.support.agl import LLM, EnqueueRolloutRequest, Span
from agl_slime.support.http import INLINE_PARSE_BYTES, listening
from agl_slime.support.threads import run_in_thread
from tests.harness.examples import ANY_JSON, drawn
from tests.harness.stores import claim, enqueue, execute, make_span


@pytest.fixture
def store() -> BridgeStore:
    return BridgeStore()


@pytest.fixture
def url(store: BridgeStore) -> Iterator[str]:
    with StoreService(store=store, token="t") as service:
        yield service.url


@pytest.fixture
async def remote(url: str) -> AsyncIterator[WorkerStore]:
    remote = WorkerStore(url, token="t")
    yield remote
    await remote.close()


def counted_batches(remote: WorkerStore) -> list[int]:
    """Grows by the number of calls in each request that ``remote`` sends."""
    batches: list[int] = []
    batcher = remote._calls
    post = batcher._handle

    async def counted(calls: list[orjson.Fragment]) -> list[dict[str, object]]:
        batches.append(len(calls))
        return await post(calls)

    batcher._handle = counted  # type: ignore[method-assign, assignment]
    return batches


async def test_many_completions_share_one_request_and_each_gets_its_result(store: BridgeStore, remote: WorkerStore):
    ids = await enqueue(store, 40)
    batches = counted_batches(remote)
    claimed = await remote.dequeue_many_rollouts(limit=40, worker_id="w")

    async def end(number: int) -> None:
        key = claimed[number].rollout_id, claimed[number].attempt.attempt_id
        numbers = await remote.get_many_span_sequence_ids([key] * (number % 4))
        written = await remote.add_many_spans([make_span(*key, n, text=f"{number}") for n in numbers])
        assert [span.sequence_id for span in written] == list(range(1, number % 4 + 1))
        assert (await remote.update_attempt(*key, status="succeeded")).status == "succeeded"

    await asyncio.gather(*(end(number) for number in range(40)))
    assert sum(batches) == 80
    assert len(batches) < 20
    for number, rollout_id in enumerate(ids):
        assert store.collections.rollout(rollout_id).status == "succeeded"  # type: ignore[union-attr]
        spans = await store.query_spans(rollout_id, "latest")
        assert [span.attributes["text"] for span in spans] == [str(number)] * (number % 4)


async def test_a_call_that_fails_or_cannot_be_encoded_fails_its_caller_only(store: BridgeStore, remote: WorkerStore):
    await enqueue(store, 1)
    claimed = await claim(store)
    key = claimed.rollout_id, claimed.attempt.attempt_id
    good, unknown, unencodable = await asyncio.gather(
        remote.update_attempt(*key, status="failed"),
        remote.update_attempt("ro-unknown", "at-unknown", status="failed"),
        remote.update_attempt(*key, metadata={"text": "caf\ud800"}),
        return_exceptions=True,
    )
    assert getattr(good, "status", None) == "failed"
    assert isinstance(unknown, ValueError)
    assert "ro-unknown" in str(unknown)
    assert isinstance(unencodable, TypeError)


async def test_spans_that_are_sent_twice_are_stored_once(store: BridgeStore, remote: WorkerStore) -> None:
    await enqueue(store, 1)
    claimed = await claim(store)
    span = make_span(claimed.rollout_id, claimed.attempt.attempt_id, 0)
    for _ in range(2):
        await remote.add_many_spans([span])
    assert len(await store.query_spans(claimed.rollout_id)) == 1


async def test_a_store_that_restarts_meanwhile_is_waited_for() -> None:
    store = BridgeStore()
    await enqueue(store, 1)
    claimed = await claim(store)
    service = await asyncio.to_thread(StoreService(store=store, token="t").start)
    url, port = service.url, int(service.url.rsplit(":", 1)[1])
    await asyncio.to_thread(service.stop)
    remote = WorkerStore(url, token="t")
    update = asyncio.create_task(
        remote.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="succeeded")
    )
    await asyncio.wait({update}, timeout=0.3)
    assert not update.done()
    restarted = await asyncio.to_thread(StoreService(store=store, token="t", port=port).start)
    assert (await asyncio.wait_for(update, 20)).status == "succeeded"
    await remote.close()
    await asyncio.to_thread(restarted.stop)


async def test_resources_are_fetched_once_in_a_while_and_by_all_together(store, remote, monkeypatch):
    update = await store.add_resources({"main_llm": LLM(endpoint="http://127.0.0.1:1", model="none")})
    fetched: list[str] = []
    fetch = RemoteStore.get_resources_by_id

    async def counted(self: RemoteStore, resources_id: str) -> object:
        fetched.append(resources_id)
        return await fetch(self, resources_id)

    monkeypatch.setattr(RemoteStore, "get_resources_by_id", counted)
    monkeypatch.setattr(client, "_RESOURCES_TTL_S", 60.0)
    first = asyncio.create_task(remote.get_resources_by_id(update.resources_id))
    waiting = [asyncio.create_task(remote.get_resources_by_id(update.resources_id)) for _ in range(20)]
    await asyncio.sleep(0)  # all have asked
    first.cancel()  # which must not cancel the request of the others
    assert await asyncio.gather(*waiting) == [update] * 20
    assert await remote.get_resources_by_id(update.resources_id) == update
    assert fetched == [update.resources_id]
    assert await remote.get_resources_by_id("rs-unknown") is None


async def test_releasing_over_http(store: BridgeStore, remote: WorkerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large requests are read in a thread."""
    in_threads: list[Any] = []

    async def noted(work: Any, *arguments: Any) -> Any:
        in_threads.append(work)
        return work(*arguments)

    monkeypatch.setattr(server, "INLINE_PARSE_BYTES", 0)
    monkeypatch.setattr(server, "run_in_thread", noted)
    ids = await execute(store, 3)
    assert await remote.release(ids[:2]) == 2
    assert orjson.loads in in_threads
    assert store.usage().released == 2


# -- recordings -------------------------------------------------------------------------------------------------------


steps = st.lists(st.sampled_from(["add", "write", "fail", "both"]), max_size=40)


class Store:
    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.next = 0
        self.fails = 0

    async def get_many_span_sequence_ids(self, keys: Sequence[tuple[str, str]]) -> list[int]:
        await asyncio.sleep(0)
        first, self.next = self.next + 1, self.next + len(keys)
        return list(range(first, self.next + 1))

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        await asyncio.sleep(0)
        if self.fails:
            self.fails -= 1
            raise ConnectionError("away")
        self.spans.extend(spans)
        return spans


@given(steps)
def test_spans_are_written_once_and_in_order(sequence: list[str]) -> None:
    async def run() -> None:
        store: Any = Store()
        recording = Recording("ro", "at", store=store)
        added = 0

        def add() -> None:
            nonlocal added
            number = added
            added += 1
            assert recording.add(partial(Span.from_attributes, name=str(number), attributes={}))

        for step in sequence:
            if step == "add":
                add()
            elif step == "write":
                await recording.write()
            elif step == "both":  # two writers at once, and a span between them
                writers = [asyncio.ensure_future(recording.write()) for _ in range(2)]
                await asyncio.sleep(0)
                add()
                await asyncio.gather(*writers)
            else:
                store.fails = 1
                await asyncio.gather(recording.write(), return_exceptions=True)
                store.fails = 0
        await recording.write(close=True)
        assert [int(span.name) for span in store.spans] == list(range(added))
        assert [span.sequence_id for span in store.spans] == sorted(span.sequence_id for span in store.spans)
        assert recording.written == store.spans
        assert not recording.add(partial(Span.from_attributes, attributes={}))

    asyncio.run(run())


ENQUEUE = "/v1/agl/queues/rollouts/enqueue"
JUNK = [b"", b"{", b"[]", b"7", b'"x"', b"null", b"\xff\xfe", b"[" * 100_000, b'{"after": ' + b"[" * 2_000]


async def post(url: str, path: str, body: bytes, **headers: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session:
        sent = {"Content-Type": "application/json", **headers}
        async with session.post(url + path, data=body, headers=sent) as answer:
            return answer.status, await answer.text()


async def test_with_a_token_the_token_decides(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with served(BridgeStore()) as (url, token):  # for worker processes, with a random one
        for sent, expected in ((f"Bearer {token}", 200), ("Bearer ", 401)):
            assert (await post(url, FEED_PATH, b"{}", Authorization=sent))[0] == expected
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


CALLS = st.fixed_dictionaries(
    {"op": st.sampled_from(["spans", "attempt", "release", "no such"]) | ANY_JSON},
    optional=dict.fromkeys(("spans", "rollout_id", "attempt_id", "fields", "rollout_ids"), ANY_JSON),
)
BODIES = st.one_of(
    ANY_JSON,
    st.fixed_dictionaries({"calls": st.lists(CALLS | ANY_JSON, max_size=3) | ANY_JSON}),
    st.fixed_dictionaries({"server_instance_id": ANY_JSON, "after": ANY_JSON, "wait_s": st.none() | st.text()}),
)


UNSTORABLE = ["NaN", "-Infinity", "1e999", "1" + "0" * 400, '"\\ud800"', "[" * 300 + "]" * 300]
AGL_BODIES = [
    (ENQUEUE, {"rollouts": [{"input": 0}]}),
    (ENQUEUE, {"rollouts": [{"input": 1, "metadata": {"key": 0}}]}),
    ("/v1/agl/rollouts", {"input": 1, "config": {"timeout_seconds": 0}}),
    ("/v1/agl/rollouts/search", {"limit": 0}),
    ("/v1/agl/queues/rollouts/dequeue", {"limit": 0, "worker_id": "w"}),
    ("/v1/agl/workers/w", {"heartbeat_stats": {"key": 0}}),
    ("/v1/agl/resources", {"resources": {"main_llm": {"resource_type": "llm", "endpoint": 0, "model": "m"}}}),
    ("/v1/agl/waits/rollouts", {"rollout_ids": [], "timeout": 0}),
    ("/v1/agl/spans", {"rollout_id": "r", "attributes": {"key": 0}}),
    ("/v1/agl/rollouts/unknown", {"status": 0}),
    ("/v1/agl/rollouts/unknown/attempts/unknown", {"metadata": {"key": 0}}),
]


@pytest.mark.parametrize("value", UNSTORABLE, ids=lambda value: value[:12])
async def test_json_that_cannot_be_stored_is_a_400_and_nothing_is_stored(value: str):
    with StoreService(store=BridgeStore()) as service:
        for path, body in AGL_BODIES:
            status, text = await post(service.url, path, json.dumps(body).replace("0", value).encode())
            assert (status, len(text) < 200) == (400, True), (path, text)
            assert isinstance(json.loads(text)["detail"], str)
        attempt = {"op": "attempt", "rollout_id": "r", "attempt_id": "a", "fields": {"metadata": {"key": 0}}}
        status, text = await post(
            service.url, BATCH_PATH, json.dumps({"calls": [attempt]}).replace("0", value).encode()
        )
        assert status == 400 or "nested more than 250 deep" in text
        assert [*await service._store.query_rollouts(), *await service._store.query_workers()] == []


async def test_every_answer_is_typed():
    with StoreService(store=BridgeStore()) as service:
        for path, body in [*AGL_BODIES, (BATCH_PATH, None), (FEED_PATH, None)]:
            values = st.fixed_dictionaries({}, optional=dict.fromkeys(body or {}, ANY_JSON))
            changed = BODIES if body is None else values.map(lambda values, body=body: {**body, **values}) | ANY_JSON
            for raw in drawn(changed, 150):
                status, text = await post(service.url, path, raw)
                assert status in ((200, 400) if body is None else (200, 201, 400, 404, 422)), (path, raw, text)
                assert status < 400 or (len(text) < 500 and isinstance(json.loads(text)["detail"], str)), text


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
async def test_requests_are_served_while_a_large_batch_is_executed(spans_of_a_call, monkeypatch):
    """Calls that name no attempt: each is refused, at the cost of reading its spans."""
    span = {"rollout_id": "r", "attempt_id": "a", "sequence_id": 1, "trace_id": "t", "span_id": "s", "name": "n"}
    span |= {"status": {"status_code": "OK"}, "resource": {"attributes": {}, "schema_url": ""}, "attributes": {}}
    span |= dict.fromkeys(("parent_id", "context", "parent", "start_time", "end_time")) | {"events": [], "links": []}
    calls = [{"op": "spans", "spans": [span] * spans_of_a_call}] * max(1, 20_000 // spans_of_a_call)
    executing, ended, answered = threading.Event(), asyncio.Event(), 0
    loads, parsing = orjson.loads, dict[bool, int]()

    def noted_loads(raw: bytes) -> Any:
        parsing[len(raw) > INLINE_PARSE_BYTES] = threading.get_ident()
        return loads(raw)

    async def noted(store: BridgeStore, body: object) -> bytes:
        executing.set()
        try:
            return await execute_batch(store, body)
        finally:
            executing.clear()

    monkeypatch.setattr("agl_slime.store.server.execute_batch", noted)
    monkeypatch.setattr(orjson, "loads", noted_loads)
    with StoreService(store=BridgeStore()) as service:

        async def look() -> None:
            nonlocal answered
            while not ended.is_set():
                started = executing.is_set()
                assert (await post(service.url, FEED_PATH, b"{}"))[0] == 200
                answered += started and executing.is_set()

        looking = asyncio.ensure_future(look())
        status, text = await post(service.url, BATCH_PATH, json.dumps({"calls": calls}).encode())
        ended.set()
        await looking
    assert (status, len(json.loads(text)["results"])) == (200, len(calls))
    assert answered >= 3
    assert parsing[True] != parsing[False]  # small bodies are parsed on the event loop


ODD = [
    ({"a": [1, {"b": float("nan")}]}, r"task\['a'\]\[1\]\['b'\] is nan"),
    ({"a": float("-inf")}, r"task\['a'\] is -inf"),
    ({"a": "half \ud83d"}, r"task\['a'\] is 'half"),
    ({"\ud83d": 1}, "a key of task is"),
    ({"a": object()}, r"task\['a'\] is <object object"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(), inside, max_size=4),
    max_leaves=12,
)


async def test_a_task_that_json_cannot_hold_is_refused_where_others_read() -> None:
    store = BridgeStore()
    service = StoreService(store=store)
    await run_in_thread(service.start)
    try:
        for task, message in ODD:
            with pytest.raises(ConfigError, match=message):
                await store.enqueue_rollout(input=task)
            with pytest.raises(ConfigError, match=message):
                await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=task)])
        task = {"n": 10**30, "text": "NaN, Infinity", "emoji": "😀"}
        await store.enqueue_rollout(input=task)
        remote = RemoteStore(service.url)
        rollout = await remote.dequeue_rollout(worker_id="worker")
        await remote.close()
        assert rollout is not None
        assert rollout.input == task
    finally:
        await run_in_thread(service.stop)
    for task, _ in ODD:
        await store.enqueue_rollout(input=task)  # this process takes it as it is


@given(task=JSON, text=st.sampled_from(["NaN", "Infinity", "-Infinity"]))
def test_json_is_never_refused(task: Any, text: str) -> None:
    check_sendable({"task": task, text: [text, task]})


# -- the feed ---------------------------------------------------------------------------------------------------------


async def take(store: RemoteStore, position: FeedPosition, n: int) -> list[str]:
    ids: list[str] = []
    async for page in store.follow_finished(position, wait_s=5):
        position.move(page)
        ids += page["rollout_ids"]
        if len(ids) >= n:
            break
    return ids


async def test_follower_gets_each_completion_once_in_order_and_resumes():
    with StoreService(store=(store := BridgeStore())) as service:
        remote, position = RemoteStore(service.url), FeedPosition()
        first = await execute(store, 3)
        assert await take(remote, position, 3) == first
        waiting = asyncio.create_task(take(remote, position, 2))
        second = await execute(remote, 2)
        assert await asyncio.wait_for(waiting, 10) == second
        assert await take(remote, FeedPosition(service.feed.server_instance_id, 2), 3) == [*first, *second][2:]
        assert await take(remote, FeedPosition("an earlier server", 40), 5) == [*first, *second]
        await remote.close()


async def test_follower_behind_the_window_gets_kept_ids_and_a_missed_flag():
    store = BridgeStore()
    feed = FinishedFeed(window=4)
    store.subscribe_finished(feed.append)
    ids = await execute(store, 10)
    page = feed.read(FeedPosition(feed.server_instance_id, 2))
    assert (page["missed"], page["rollout_ids"]) == (True, ids[6:])
    assert not feed.read(FeedPosition(feed.server_instance_id, 6))["missed"]
    assert feed.read(FeedPosition("an earlier server", 40))["missed"]
    assert len(feed._ids) == len(feed._id_set) == 4


async def test_a_token_keeps_everyone_else_out():
    with StoreService(store=BridgeStore(), token="secret") as service:
        remote = RemoteStore(service.url, token="secret")
        assert len(await execute(remote, 1)) == 1
        await remote.close()
        stranger = RemoteStore(service.url, retry_delays=(), health_retry_delays=())
        with pytest.raises(DataSourceError, match="AGL_SLIME_STORE_TOKEN"):
            await take(stranger, FeedPosition(), 1)
        with pytest.raises(Exception, match="401"):
            await stranger.enqueue_rollout(input={})
        await stranger.close()


async def test_stock_store_without_the_feed_is_an_error():
    from agentlightning.utils.server_launcher import PythonServerLauncherArgs

    from agl_slime.support.agl import LightningStoreServer

    arguments = PythonServerLauncherArgs(host="127.0.0.1", access_host="127.0.0.1", launch_mode="thread")
    server = LightningStoreServer(BridgeStore(), launcher_args=arguments)
    await server.start()
    try:
        remote = RemoteStore(server.endpoint)
        with pytest.raises(DataSourceError, match="StoreService"):
            await take(remote, FeedPosition(), 1)
        await remote.close()
    finally:
        await server.stop()
