"""Batched store calls over real HTTP, against the same calls in process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import orjson
import pytest

from agl_slime.store import client
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import RemoteStore, WorkerStore
from agl_slime.store.server import StoreService
from agl_slime.support.agl import LLM
from tests.harness.stores import claim, enqueue, execute, make_span


@pytest.fixture
def served() -> Iterator[tuple[BridgeStore, str]]:
    store = BridgeStore()
    with StoreService(store=store, token="t") as service:
        yield store, service.url


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


async def test_many_completions_share_one_request_and_each_gets_its_result(
    served: tuple[BridgeStore, str],
) -> None:
    store, url = served
    ids = await enqueue(store, 40)
    remote = WorkerStore(url, token="t")
    batches = counted_batches(remote)
    claimed = await remote.dequeue_many_rollouts(limit=40, worker_id="w")

    async def end(number: int) -> None:
        attempt = claimed[number].attempt
        numbers = await remote.get_many_span_sequence_ids([(attempt.rollout_id, attempt.attempt_id)] * (number % 4))
        written = await remote.add_many_spans(
            [make_span(attempt.rollout_id, attempt.attempt_id, n, text=f"{number}") for n in numbers]
        )
        assert [span.sequence_id for span in written] == list(range(1, number % 4 + 1))
        assert (
            await remote.update_attempt(attempt.rollout_id, attempt.attempt_id, status="succeeded")
        ).status == "succeeded"

    await asyncio.gather(*(end(number) for number in range(40)))
    assert sum(batches) == 80
    assert len(batches) < 20
    for number, rollout_id in enumerate(ids):
        rollout = await store.get_rollout_by_id(rollout_id)
        assert rollout is not None
        assert rollout.status == "succeeded"
        spans = await store.query_spans(rollout_id, "latest")
        assert [span.attributes["text"] for span in spans] == [str(number)] * (number % 4)
    await remote.close()


async def test_a_call_that_fails_does_not_stop_the_others(served: tuple[BridgeStore, str]) -> None:
    store, url = served
    await enqueue(store, 1)
    claimed = await claim(store)
    remote = WorkerStore(url, token="t")
    good, bad = await asyncio.gather(
        remote.update_attempt(claimed.rollout_id, claimed.attempt.attempt_id, status="failed"),
        remote.update_attempt("ro-unknown", "at-unknown", status="failed"),
        return_exceptions=True,
    )
    assert getattr(good, "status", None) == "failed"
    assert isinstance(bad, ValueError)
    assert "ro-unknown" in str(bad)
    await remote.close()


async def test_unencodable_call_fails_its_caller_only(served: tuple[BridgeStore, str]) -> None:
    store, url = served
    await enqueue(store, 1)
    claimed = await claim(store)
    remote = WorkerStore(url, token="t")
    key = claimed.rollout_id, claimed.attempt.attempt_id
    good, bad = await asyncio.gather(
        remote.update_attempt(*key, status="failed"),
        remote.update_attempt(*key, metadata={"text": "caf\ud800"}),
        return_exceptions=True,
    )
    assert getattr(good, "status", None) == "failed"
    assert isinstance(bad, TypeError)
    await remote.close()


async def test_spans_that_are_sent_twice_are_stored_once(served: tuple[BridgeStore, str]) -> None:
    store, url = served
    await enqueue(store, 1)
    claimed = await claim(store)
    remote = WorkerStore(url, token="t")
    span = make_span(claimed.rollout_id, claimed.attempt.attempt_id, 0)
    await remote.add_many_spans([span])
    await remote.add_many_spans([span])
    assert len(await store.query_spans(claimed.rollout_id)) == 1
    await remote.close()


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
    again = await asyncio.to_thread(StoreService(store=store, token="t", port=port).start)
    assert (await asyncio.wait_for(update, 20)).status == "succeeded"
    await remote.close()
    await asyncio.to_thread(again.stop)


async def test_resources_are_fetched_once_in_a_while(served: tuple[BridgeStore, str]) -> None:
    store, url = served
    update = await store.add_resources({"main_llm": LLM(endpoint="http://127.0.0.1:1", model="none")})
    remote = WorkerStore(url, token="t")
    first = await remote.get_resources_by_id(update.resources_id)
    assert first == update
    assert await remote.get_resources_by_id(update.resources_id) is first
    assert await remote.get_resources_by_id("rs-unknown") is None
    await remote.close()


async def test_rollouts_that_begin_together_fetch_their_resources_together(
    served: tuple[BridgeStore, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, url = served
    update = await store.add_resources({"main_llm": LLM(endpoint="http://127.0.0.1:1", model="none")})
    fetched: list[str] = []
    fetch = RemoteStore.get_resources_by_id

    async def counted(self: RemoteStore, resources_id: str) -> object:
        fetched.append(resources_id)
        return await fetch(self, resources_id)

    monkeypatch.setattr(RemoteStore, "get_resources_by_id", counted)
    remote = WorkerStore(url, token="t")
    first = asyncio.create_task(remote.get_resources_by_id(update.resources_id))
    others = [asyncio.create_task(remote.get_resources_by_id(update.resources_id)) for _ in range(20)]
    await asyncio.sleep(0)  # all have asked
    first.cancel()  # whoever asked for the others may go
    assert await asyncio.gather(*others) == [update] * 20
    assert fetched == [update.resources_id]
    await remote.close()


async def test_requests_keep_their_distance_and_take_all_that_has_come(
    served: tuple[BridgeStore, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, url = served
    await enqueue(store, 6)
    monkeypatch.setattr(client, "_BETWEEN_REQUESTS_S", 1.0)
    remote = WorkerStore(url, token="t")
    batches = counted_batches(remote)
    claimed = await remote.dequeue_many_rollouts(limit=6, worker_id="w")
    ends = [remote.update_attempt(one.rollout_id, one.attempt.attempt_id, status="succeeded") for one in claimed]
    await asyncio.wait_for(
        ends[0], 20
    )  # the first after a pause goes at once, and five that come after it wait for each other
    assert [attempt.status for attempt in await asyncio.wait_for(asyncio.gather(*ends[1:]), 20)] == ["succeeded"] * 5
    assert batches == [1, 5]
    await remote.close()


async def test_releasing_over_http(served: tuple[BridgeStore, str]) -> None:
    store, url = served
    ids = await execute(store, 3)
    remote = RemoteStore(url, token="t")
    assert await remote.release(ids[:2]) == 2
    assert store.usage().released == 2
    await remote.close()
