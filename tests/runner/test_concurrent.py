"""The runner against a real store: many rollouts at once, each span on its own rollout, every failure with its
reason."""

import asyncio
import random
import sys
import threading
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace as otel

from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.runner import concurrent, guard
from agl_slime.runner.base import RunnerPlan, make_runners
from agl_slime.runner.concurrent import RunnerThread
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import emit_reward, find_final_reward
from agl_slime.support.threads import run_in_thread
from agl_slime.tokens.reward import read_reward
from tests.harness.stores import enqueue_inputs
from tests.runner.function_agents import (
    RESOURCES,
    ClaimCounter,
    Concurrency,
    FnAgent,
    SyncFnAgent,
    finished,
    quick,
    reason_of,
    running,
    spans_of,
)


async def test_slow_starting_agents_do_not_delay_each_others_connections() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    started, between = list[int](), list[int]()

    async def work(task: int) -> float:
        started.append(task)  # here it makes a client, which blocks the loop
        number = len(started)
        await asyncio.open_connection(host, port)
        between.append(len(started) - number)
        return 1.0

    async with server, running(FnAgent(work), gateway=GatewaySettings()) as store:
        assert {rollout.status for rollout in await finished(store, range(16))} == {"succeeded"}
    assert len(between) == 16
    assert max(between) < 5  # starts of others before a connection


async def test_each_reward_lands_on_its_own_rollout_across_tasks_and_threads() -> None:
    together, many = Concurrency(), asyncio.Event()

    async def work(task: int) -> None:
        with together.counted():
            if together.most > 50:
                many.set()
            async with asyncio.timeout(20):  # a loaded machine starts rollouts more slowly than they would end
                await many.wait()
            rng = random.Random(task)
            await asyncio.sleep(rng.random() * 0.05)

            async def nested() -> None:
                await asyncio.sleep(rng.random() * 0.01)
                with otel.get_tracer("third-party").start_as_current_span(f"nested-{task}"):
                    await run_in_thread(lambda: otel.get_tracer("third-party").start_span(f"thread-{task}").end())

            await asyncio.gather(
                nested(), asyncio.to_thread(lambda: otel.get_tracer("x").start_span(f"to-thread-{task}").end())
            )
            emit_reward(float(task))

    async with running(FnAgent(work)) as store:
        for task, rollout in enumerate(await finished(store, range(200))):
            assert rollout.status == "succeeded"
            spans = await spans_of(store, rollout)
            assert find_final_reward(spans) == task
            names = {span.name for span in spans} - {"agentlightning.annotation"}
            assert names == {f"nested-{task}", f"thread-{task}", f"to-thread-{task}"}
            assert [span.sequence_id for span in spans] == sorted(span.sequence_id for span in spans)
    assert together.most > 50


async def test_sync_agents_of_stock_agent_lightning_run_unchanged_and_at_once() -> None:
    together = threading.Barrier(100)

    def work(task: int) -> float:
        together.wait(20)  # each waits for all others
        return float(task)

    async with running(SyncFnAgent(work)) as store:
        for task, rollout in enumerate(await finished(store, range(100))):
            assert find_final_reward(await spans_of(store, rollout)) == task


@pytest.mark.parametrize(
    ("fn", "reason", "message"),
    [
        (lambda _: {}["missing"], "KeyError", "missing"),
        # a message that JSON cannot encode must not turn the failure into `no_reward`
        (lambda _: int("caf\ud800"), "ValueError", "caf"),
        (lambda _: "great", "bad_reward", "great"),
        (lambda _: {"reward": "1.0"}, "bad_reward", "The agent['reward'] returned '1.0'"),
        (lambda _: [0.5], "bad_reward", "The agent returned [0.5] of type list"),
    ],
)
async def test_agent_errors_fail_the_rollout_with_their_reason(fn: Any, reason: str, message: str) -> None:
    async with running(FnAgent(fn)) as store:
        [rollout] = await finished(store, [0])
        assert rollout.status == "failed"
        stored_reason, stored_message = await reason_of(store, rollout)
        assert stored_reason == reason
        assert message in stored_message


@pytest.mark.parametrize("kind", [FnAgent, SyncFnAgent])
async def test_an_agent_returns_rewards_of_every_kind_that_a_class_may(kind: Any) -> None:
    named = {"right": np.float32(0.5), "short": True, "style": None}
    returned = [0.5, 1, True, np.float32(0.25), np.int64(-2), np.bool_(False), np.array([3.0]), named]
    async with running(kind(lambda task: returned[task])) as store:
        rewards = [read_reward(await spans_of(store, rollout)) for rollout in await finished(store, range(8))]
    assert [reward.primary for reward in rewards] == [0.5, 1, 1, 0.25, -2, 0, 3, 0.5]
    assert (rewards[-1].named, rewards[-1].missing) == ({"right": 0.5, "short": 1.0}, ("style",))


async def test_an_agent_that_ignores_its_cancellation_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "_CANCEL_GRACE_S", 0.2)
    release = threading.Event()

    async def work(task: Any) -> float:
        while not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
        return 1.0

    # with its default debounce the store's watchdog may mark the attempt first, with the same reason and a shorter
    # message
    async with running(FnAgent(work), BridgeStore(scan_debounce_seconds=60)) as store:
        [rollout] = await finished(store, [0], timeout_seconds=0.2)
        reason, message = await reason_of(store, rollout)
        release.set()
        assert (rollout.status, reason) == ("failed", "timeout")
        assert "ignored its cancellation" in message


async def test_a_store_without_resources_fails_the_rollout_instead_of_leaving_it() -> None:
    store = BridgeStore()
    with RunnerThread(agent=FnAgent(lambda _: 1.0), store=store, settings=quick()):
        [rollout] = await finished(store, [0])
    assert rollout.status == "failed"


async def test_no_more_rollouts_are_in_flight_than_allowed() -> None:
    together = Concurrency()

    async def work(task: Any) -> float:
        with together.counted():
            await asyncio.sleep(0.01)
        return 1.0

    async with running(FnAgent(work), max_concurrent=7) as store:
        assert {rollout.status for rollout in await finished(store, range(60))} == {"succeeded"}
    assert together.most == 7


@pytest.mark.parametrize(("pause_s", "claims"), [(30.0, [2, 2]), (0.001, [1])])
async def test_places_that_become_free_in_a_full_house_are_filled_together(monkeypatch, pause_s, claims):
    monkeypatch.setattr(concurrent, "_FREE_PAUSE_S", pause_s)
    places = 2 * concurrent._FREE_SHARE
    ends: dict[int, asyncio.Event] = {}
    loops: list[asyncio.AbstractEventLoop] = []
    started = threading.Semaphore(0)

    async def work(task: int) -> float:
        loops[:] = [asyncio.get_running_loop()]
        ends[task] = asyncio.Event()
        started.release()
        await ends[task].wait()
        return 1.0

    async def have_started(count: int) -> None:
        for _ in range(count):
            assert await asyncio.to_thread(started.acquire, timeout=20)

    store = ClaimCounter()
    await store.add_resources({**RESOURCES})
    await enqueue_inputs(store, range(places + sum(claims)))
    with RunnerThread(agent=FnAgent(work), store=store, settings=quick(poll_interval_s=60.0, max_concurrent=places)):
        await have_started(places)
        store.limits.clear()
        for count in claims:
            loops[0].call_soon_threadsafe(lambda count=count: [ends.popitem()[1].set() for _ in range(count)])
            await have_started(count)
    assert store.limits == claims


async def test_a_failed_attempt_is_tried_again_and_only_the_last_one_counts() -> None:
    tries: dict[int, int] = {}

    async def work(task: int) -> float:
        tries[task] = tries.get(task, 0) + 1
        emit_reward(-100.0)  # of an attempt that may fail later
        if tries[task] < 3:
            raise ConnectionError("not yet")
        return float(task)

    async with running(FnAgent(work)) as store:
        rollouts = await finished(store, [1, 2], max_attempts=3, retry_condition=["failed"])
        assert tries == {1: 3, 2: 3}
        for rollout in rollouts:
            spans = await spans_of(store, rollout)
            assert find_final_reward(spans) == rollout.input
            assert sum(span.name == "agentlightning.annotation" for span in spans) == 2


def test_a_plan_is_read_and_written_or_refused_by_name() -> None:
    for text, kind, count in (("inproc", "inproc", 1), ("process:16", "process", 16)):
        plan = RunnerPlan.parse(text)
        assert (plan.kind, plan.count, str(plan)) == (kind, count, text)
    for text in ("", "process", "process:", "process:0", "inproc:1", "thread:2", "ray:1.5", "ray:²"):
        with pytest.raises(ConfigError, match="expected inproc, controller, process:N or ray:N"):
            RunnerPlan.parse(text)


def test_ray_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        make_runners(RunnerPlan("ray", 2), agent=FnAgent(float), store=BridgeStore())
