"""The retention of a ``BridgeStore``, its backpressure and watchdog, and dead runners."""

import logging
import time

import pytest

from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.process_pool import ProcessPool
from agl_slime.store.bridge import WORKER_DIED, BridgeStore, Retention
from agl_slime.support.agl import LLM, LitAgent, RolloutConfig
from tests.harness.stores import claim, enqueue, enqueue_inputs, execute, make_span


def sizes(store: BridgeStore) -> dict[str, int]:
    """Sizes of the collections that have an entry per rollout."""
    collections = store.collections
    return {
        "rollouts": len(collections.rollouts._items),
        "attempts": len(collections.attempts._items),
        "spans": len(collections.spans._items),
        "sequence ids": len(collections.span_sequence_ids._values),
        "events": len(store._completion_events),
        "start times": len(store._start_time_by_rollout),
        "span bytes": len(store._span_bytes_by_rollout),
        "running": len(store._running_rollout_ids),
        "evicted": len(store._evicted_rollout_span_sets),
        "watched": len(store._next_checks),
        "queue": len(collections._rollout_queue._items),
    }


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which the test moves."""
    now = [1_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


async def test_released_rollouts_leave_nothing_behind() -> None:
    store = BridgeStore(retention=Retention(released_rollouts=0))
    for _ in range(3):
        ids = await execute(store, 10)
        assert await store.release(ids) == 10
        assert sizes(store) == dict.fromkeys(sizes(store), 0)
    for _ in range(20):  # with a time limit, which is watched
        await enqueue_inputs(store, range(1), timeout_seconds=60)
        running = await claim(store)
        await store.update_attempt(running.rollout_id, running.attempt.attempt_id, status="succeeded")
        await store.release([running.rollout_id])
    assert not store._next_checks
    statistics = await store.statistics()
    totals = ("total_rollouts", "total_attempts", "total_spans", "total_span_bytes")
    assert [statistics[name] for name in totals] == [0] * 4  # type: ignore[literal-required]


async def test_the_most_recently_released_stay_readable_within_a_bound_of_bytes() -> None:
    store = BridgeStore(retention=Retention(released_rollouts=3))
    ids = await execute(store, 5)
    await store.release(ids)
    rollouts = [await store.get_rollout_by_id(rollout_id) for rollout_id in ids]
    assert [rollout is not None for rollout in rollouts] == [False] * 2 + [True] * 3
    assert [len(await store.query_spans(rollout_id, "latest")) for rollout_id in ids] == [0, 0, 1, 1, 1]
    attempt = await store.get_latest_attempt(ids[-1])
    assert attempt is not None
    late = make_span(ids[-1], attempt.attempt_id, 2, text="x" * 5_000)  # accounted to the window
    await store.add_many_spans([late])
    assert store.usage().unreleased_bytes == 0
    assert store.usage().span_bytes > 7_000
    store = BridgeStore(retention=Retention(released_bytes=250_000))
    await store.release(await execute(store, 5, span_chars=98_000))
    usage = store.usage()
    assert (usage.released, usage.stored) == (2, 2)
    assert 190_000 < usage.span_bytes <= 250_000


async def test_only_finished_rollouts_are_released_and_no_others_dropped() -> None:
    store = BridgeStore(retention=Retention(released_rollouts=0, unreleased_bytes=50_000))
    ids = await execute(store, 4, span_chars=9_000)
    assert await store.release([ids[0], ids[0]]) == 1
    assert await store.release(ids[:1]) == 0
    for rollout_id in ids[1:]:
        assert len(await store.query_spans(rollout_id, "latest")) == 1
    store = BridgeStore()
    await enqueue(store)
    running = await claim(store)
    assert await store.release([running.rollout_id, "ro-unknown"]) == 0


async def test_full_store_warns_once_and_dequeues_nothing_until_a_release(caplog: pytest.LogCaptureFixture) -> None:
    store = BridgeStore(retention=Retention(unreleased_bytes=100_000, released_rollouts=0))
    with caplog.at_level(logging.WARNING, "agl_slime.store.bridge"):
        ids = await execute(store, 6, span_chars=10_000)
        assert not caplog.records
        ids += await execute(store, 1, span_chars=10_000)  # 7 spans of 12 kB: above 80 %
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        ids += await execute(store, 2, span_chars=10_000)
        assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    assert store.usage().backpressure
    [waiting] = await enqueue(store)
    assert await store.dequeue_many_rollouts(limit=5) == []
    assert await store.dequeue_rollout() is None
    await store.release(ids[:1])  # 96 kB: still above the warning, and a hold ends below it, not at the limit
    assert await store.dequeue_rollout() is None
    await store.release(ids[1:3])
    assert not store.usage().backpressure
    assert (await claim(store)).rollout_id == waiting


async def test_old_resources_go_and_the_latest_stay() -> None:
    store = BridgeStore()
    llms = [LLM(endpoint="http://127.0.0.1:1", model=str(n)) for n in range(1_005)]
    updates = [await store.add_resources({"main_llm": llm}) for llm in llms]
    assert await store.get_resources_by_id(updates[4].resources_id) is None
    assert await store.get_resources_by_id(updates[5].resources_id) == updates[5]
    assert await store.get_latest_resources() == updates[-1]
    assert (await store.statistics())["total_resources"] == 1_000


# -- the watchdog ----------------------------------------------------------------------------------------------------


async def test_watchdog_finds_exactly_the_rollouts_past_their_limits(now: list[float]) -> None:
    store = BridgeStore(scan_debounce_seconds=0)
    await enqueue_inputs(store, range(1), timeout_seconds=10)
    await enqueue_inputs(store, range(1), unresponsive_seconds=20)
    await enqueue(store)
    timed, silent, free = [await claim(store) for _ in range(3)]

    async def statuses() -> list[str]:
        attempts = [await store.get_latest_attempt(rollout.rollout_id) for rollout in (timed, silent, free)]
        return [attempt.status for attempt in attempts if attempt is not None]

    now[0] += 9
    assert await statuses() == ["preparing"] * 3
    await store.add_many_spans([make_span(silent.rollout_id, silent.attempt.attempt_id, 1)])  # a sign of life
    now[0] += 2
    assert await statuses() == ["timeout", "running", "preparing"]
    now[0] += 17  # 19 s after the sign of life
    assert (await statuses())[1] == "running"
    await store.update_rollout(free.rollout_id, config=RolloutConfig(timeout_seconds=29))  # while it runs
    now[0] += 2
    assert (await statuses())[1:] == ["unresponsive", "timeout"]
    assert (await store.get_rollout_by_id(silent.rollout_id)).status == "failed"  # type: ignore[union-attr]


async def test_a_scan_looks_at_nothing_when_nothing_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    store = BridgeStore(scan_debounce_seconds=0)
    await enqueue_inputs(store, range(50), timeout_seconds=600)
    await store.dequeue_many_rollouts(limit=50)
    ids = []
    monkeypatch.setattr(store.collections, "rollout", lambda rollout_id: ids.append(rollout_id))
    await store._scan_for_unhealthy_rollouts()
    assert ids == []
    assert len(store._next_checks) == 50


# -- dead runners ----------------------------------------------------------------------------------------------------


async def test_rollouts_of_a_dead_runner_are_requeued_even_without_attempts_left() -> None:
    store = BridgeStore()
    ended: list[str] = []
    store.subscribe_finished(lambda rollout: ended.append(rollout.rollout_id))
    first, second = await enqueue_inputs(store, range(2), max_attempts=1)
    assert (await claim(store, "dead")).rollout_id == first
    assert (await claim(store, "alive")).rollout_id == second
    assert await store.fail_worker("dead", reason="killed by signal 9") == [first]
    assert await store.fail_worker("dead") == []
    assert ended == []
    retry = await claim(store, "alive")
    assert (retry.rollout_id, retry.attempt.sequence_id) == (first, 2)
    [died, _] = await store.query_attempts(first)
    assert died.metadata == {WORKER_DIED: "killed by signal 9"}
    assert (await store.get_latest_attempt(second)).status == "preparing"  # type: ignore[union-attr]


async def test_a_runner_process_that_is_gone_gets_no_rollout() -> None:
    class Ended(ProcessPool):
        def _wait_for_end(self, worker: object) -> tuple[str, str]:
            return "killed by signal 9", ""

    store = BridgeStore()
    [only] = await enqueue(store, 1)
    Ended(plan=RunnerPlan("process", 1), agent=LitAgent(), store=store)._follow("gone", None)
    assert await store.dequeue_rollout(worker_id="gone") is None
    assert await store.dequeue_many_rollouts(limit=4, worker_id="gone") == []
    await store.fail_worker("silent")  # without heartbeats, but perhaps alive
    assert (await claim(store, "silent")).rollout_id == only


async def test_a_rollout_that_kills_its_runners_is_given_up() -> None:
    store = BridgeStore()
    [poison] = await enqueue_inputs(store, range(1), max_attempts=1)
    for worker in ("a", "b", "c"):
        assert (await claim(store, worker)).rollout_id == poison
        await store.fail_worker(worker)
    rollout = await store.get_rollout_by_id(poison)
    assert rollout is not None
    assert rollout.status == "failed"
    assert await store.dequeue_rollout() is None


async def test_a_rollout_that_stopped_its_runner_is_the_one_that_pays() -> None:
    store = BridgeStore()
    innocent, *stuck = await enqueue_inputs(store, range(4), max_attempts=1)
    for cause in stuck:
        while await store.dequeue_rollout(worker_id=cause) is not None:
            pass  # each runner has all that are left
        await store.fail_worker(cause, reason="killed", cause=cause)
    left = {rollout.rollout_id: rollout.status for rollout in await store.query_rollouts()}
    assert left == dict.fromkeys(stuck, "failed") | {innocent: "requeuing"}


async def test_worker_is_dead_after_its_heartbeats_stop_but_not_without_any(now: list[float]) -> None:
    store = BridgeStore(scan_debounce_seconds=0, dead_worker_seconds=60)
    ids = await enqueue(store, 2)
    await claim(store, "beating")
    await claim(store, "quiet")
    await store.update_worker("beating", {})
    for seconds, queued in ((59, 0), (20, 1)):
        now[0] += seconds
        await store.query_workers()
        assert store.usage().queued == queued
    assert (await claim(store, "third")).rollout_id == ids[0]
    now[0] += 100
    await store.query_workers()
    assert store.usage().queued == 0  # judged once per silence
