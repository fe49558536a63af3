"""Writers of spans: batched calls over real HTTP, against the same calls in process, and recordings."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.store import client, server
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import RemoteStore, WorkerStore
from agl_slime.store.recording import Recording
from agl_slime.store.server import StoreService
from agl_slime.support.agl import LLM, Span
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
