"""Internals of Agent Lightning 0.3 that ``BridgeStore`` overrides: a version that changes one fails here, by name."""

import asyncio
import inspect
import sys
from collections.abc import Coroutine
from typing import Any

import pytest
from agentlightning.store.collection.memory import (
    DequeBasedQueue,
    DictBasedKeyValue,
    InMemoryLightningCollections,
    ListBasedCollection,
)
from agentlightning.store.collection_based import CollectionBasedLightningStore

from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, EnqueueRolloutRequest, InMemoryLightningStore, LitAgentRunner, RolloutConfig
from tests.harness.stores import make_span

ATTEMPT = "self collections rollout_id attempt_id"
UPDATE = f"{ATTEMPT} status worker_id last_heartbeat_time metadata"


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (InMemoryLightningStore, "_post_update_rollout", "self rollouts skip_enqueue"),
        (InMemoryLightningStore, "_post_add_spans", "self spans rollout_id attempt_id"),
        (InMemoryLightningStore, "_maybe_evict_spans", "self collections"),
        (InMemoryLightningStore, "_unlocked_get_running_rollouts", "self collections"),
        (CollectionBasedLightningStore, "_scan_for_unhealthy_rollouts", "self"),
        (CollectionBasedLightningStore, "_find_and_update_unhealthy_rollouts", "self collections"),
        (CollectionBasedLightningStore, "_unlocked_update_attempt_and_rollout", UPDATE),
        (CollectionBasedLightningStore, "_on_attempt_heartbeat", ATTEMPT),
        (InMemoryLightningCollections, "execute", "self callback mode snapshot commit labels kwargs"),
        (InMemoryLightningCollections, "atomic", "self mode snapshot labels kwargs"),
        (LitAgentRunner, "_step_impl", "self next_rollout raise_on_exception"),
        (LitAgentRunner, "_start_heartbeat_loop", "self store"),
    ],
)
def test_a_hook_has_the_shape_that_is_overridden(owner: type, name: str, parameters: str) -> None:
    assert list(inspect.signature(getattr(owner, name)).parameters) == parameters.split()


def test_store_and_collections_keep_their_records_where_they_are_looked_up() -> None:
    store = InMemoryLightningStore(thread_safe=True)
    for kind, names in {
        dict: ("_span_bytes_by_rollout", "_start_time_by_rollout", "_completion_events"),
        int: ("_total_span_bytes", "_memory_capacity_bytes"),
        set: ("_running_rollout_ids",),
    }.items():
        for name in names:
            assert isinstance(getattr(store, name), kind), name
    stock = InMemoryLightningCollections(lock_type="thread")
    for name, keys in {
        "_rollouts": ("rollout_id",),
        "_attempts": ("rollout_id", "attempt_id"),
        "_spans": ("rollout_id", "attempt_id", "span_id"),
        "_resources": ("resources_id",),
        "_workers": ("worker_id",),
    }.items():
        collection = getattr(stock, name)
        assert isinstance(collection, ListBasedCollection), name
        assert (collection._primary_keys, collection._items, collection._size) == (keys, {}, 0), name
    assert isinstance(stock._rollout_queue, DequeBasedQueue)
    assert isinstance(stock._span_sequence_ids, DictBasedKeyValue)


def test_no_store_call_is_measured() -> None:
    def names_of_calls(store: InMemoryLightningStore) -> list[str]:
        names: list[str] = []
        sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
        try:
            asyncio.run(store.enqueue_rollout(input={}))
        finally:
            sys.setprofile(None)
        return names

    assert "tracking_context" in names_of_calls(InMemoryLightningStore(thread_safe=True))
    ours = names_of_calls(BridgeStore())
    assert "enqueue_rollout" in ours
    assert "tracking_context" not in ours


def finish_without_suspending(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine that must not wait for anything: threads, not tasks, hold the store's one lock."""
    try:
        awaited = work.send(None)
    except StopIteration as stop:
        return stop.value
    work.close()
    raise AssertionError(f"the store suspended for {awaited!r}, perhaps with its lock held")


def test_no_store_call_suspends() -> None:
    run = finish_without_suspending
    store = BridgeStore(scan_debounce_seconds=0)
    resources = run(store.add_resources({"main_llm": LLM(endpoint="http://127.0.0.1:1", model="none")}))
    config = RolloutConfig(timeout_seconds=600, unresponsive_seconds=600, max_attempts=2, retry_condition=["failed"])
    [queued] = run(store.enqueue_many_rollouts([EnqueueRolloutRequest(input={}, mode="train", config=config)]))
    [claimed] = run(store.dequeue_many_rollouts(limit=5, worker_id="one"))
    rollout_id, attempt_id = claimed.rollout_id, claimed.attempt.attempt_id
    assert rollout_id == queued.rollout_id
    numbers = run(store.get_many_span_sequence_ids([(rollout_id, attempt_id)] * 3))
    assert list(numbers) == [1, 2, 3]
    run(store.add_many_spans([make_span(rollout_id, attempt_id, number) for number in numbers]))
    run(store.update_worker("one", {"busy": True}))
    run(store.update_attempt(rollout_id, attempt_id, status="failed"))
    assert run(store.get_rollout_by_id(rollout_id)).status == "requeuing"
    retry = run(store.dequeue_rollout(worker_id="two"))
    run(store.update_attempt(rollout_id, retry.attempt.attempt_id, status="succeeded"))
    assert len(run(store.query_spans(rollout_id, attempt_id))) == 3
    assert len(run(store.query_rollouts(status_in=["succeeded"]))) == 1
    assert len(run(store.query_attempts(rollout_id))) == 2
    assert run(store.get_latest_attempt(rollout_id)).sequence_id == 2
    assert run(store.get_resources_by_id(resources.resources_id)) == run(store.get_latest_resources())
    assert len(run(store.query_workers())) == 2
    assert run(store.release([rollout_id])) == 1
    assert run(store.statistics())["total_rollouts"] == 1
