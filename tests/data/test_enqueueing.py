"""``run_rollouts``: results as they end, a limit in flight, cancellation at any moment, a source that ends."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import pytest

from agl_slime.data import enqueueing
from agl_slime.data.enqueueing import HealthCheck, TaskGroup, enqueue_requests, run_rollouts
from agl_slime.data.results import MemberResult, Outcome
from agl_slime.data.source import GroupSource
from agl_slime.errors import DataSourceError, LoopError
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import Rollout
from tests.harness.datasource import QUICK, counts_of
from tests.harness.stores import finish
from tests.harness.waiting import until


class Case:
    """A store whose rollouts a test ends; ``gate`` delays the answer of the store."""

    def __init__(self, source: GroupSource, store: BridgeStore) -> None:
        self.source, self.store = source, store
        self.ids: list[str] = []
        self.gate: asyncio.Event | None = None
        self.enqueued = asyncio.Event()
        self._post = asyncio.get_running_loop().call_soon_threadsafe

    def run(self, n: int, **options: Any) -> AsyncIterator[MemberResult]:
        groups = [TaskGroup(f"g{number}", {"n": number}) for number in range(n)]
        options = {"health": HealthCheck(self.source.raise_if_dead), **options}
        return run_rollouts(self.source, groups, self._enqueue, **options)

    async def _enqueue(self, groups: Sequence[TaskGroup]) -> Sequence[Rollout]:
        requests = enqueue_requests(groups, size=1, mode="val", resources_id=None, timeout_s=60)
        rollouts = await self.store.enqueue_many_rollouts(requests)
        self.ids += [rollout.rollout_id for rollout in rollouts]
        self._post(self.enqueued.set)
        if self.gate is not None:
            await until(self.gate.is_set)
        return rollouts

    async def cancelled(self) -> None:
        """All rollouts have been cancelled, in the ledger and in the store."""
        await until(lambda: sum(counts_of(self.source).values()) == len(self.ids))
        async with asyncio.timeout(10):
            ended = {"succeeded", "cancelled"}
            while {rollout.status for rollout in await self.store.query_rollouts()} - ended:  # noqa: ASYNC110 - polls the store
                await asyncio.sleep(0.005)


@pytest.fixture
async def case() -> AsyncIterator[Case]:
    store = BridgeStore()
    with GroupSource(store=store, settings=QUICK) as source:
        yield Case(source, store)


async def test_results_come_as_they_end_under_a_limit_in_flight(case: Case) -> None:
    results = case.run(3, max_in_flight=2)
    members = []
    for index, reward, n_enqueued in ((1, 1.0, 2), (0, None, 2), (2, 1.0, 3)):
        following = asyncio.ensure_future(anext(results))  # type: ignore[arg-type]
        await case.enqueued.wait()
        await until(lambda n=n_enqueued: len(case.ids) >= n)
        assert len(case.ids) <= 2 + len(members)
        await finish(case.store, case.ids[index], reward=reward)
        member = await following
        members.append((member.rollout_id, member.failure))
    assert members == [(case.ids[1], None), (case.ids[0], "no_reward"), (case.ids[2], None)]
    assert [result async for result in results] == []
    assert case.source.ingestor.on_end == {}  # a restart of the store calls what is left
    assert counts_of(case.source) == {Outcome.VALIDATED: 2, Outcome.FAILED: 1}


@pytest.mark.parametrize("moment", ["enqueueing", "running"])
async def test_cancellation_at_any_moment_leaves_nothing_in_flight(case: Case, moment: str) -> None:
    case.gate = asyncio.Event()
    if moment == "running":
        case.gate.set()
    running = asyncio.ensure_future(anext(case.run(3)))  # type: ignore[arg-type]
    await case.enqueued.wait()
    if moment == "running":
        await until(lambda: case.source.ledger.counts().open == 3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    case.gate.set()  # pending rollouts arrive after the cancellation
    await case.cancelled()
    reason = "aborted" if moment == "running" else "group_finalized"
    assert case.source.ledger.counts().reasons == {(Outcome.CANCELLED, reason): 3}


async def test_an_iteration_that_its_caller_leaves_is_cancelled(case: Case) -> None:
    results = case.run(2, cancel_reason="enough")
    first = asyncio.ensure_future(anext(results))  # type: ignore[arg-type]
    await case.enqueued.wait()
    await finish(case.store, case.ids[0])
    await first
    await results.aclose()  # type: ignore[attr-defined]
    await case.cancelled()
    assert case.source.ledger.counts().reasons[Outcome.CANCELLED, "enough"] == 1


async def test_a_source_that_stops_ends_the_wait_at_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueueing, "_HEALTH_CHECK_INTERVAL_S", 60.0)
    running = asyncio.ensure_future(anext(case.run(1)))  # type: ignore[arg-type]
    await case.enqueued.wait()
    await asyncio.to_thread(case.source.stop)
    with pytest.raises(DataSourceError, match="stopped"):
        await asyncio.wait_for(running, 10)


async def test_an_error_of_the_store_or_of_the_health_check_is_raised(case: Case) -> None:
    def raise_if_dead() -> None:
        raise LoopError("the engine has died")

    with pytest.raises(LoopError, match="the engine has died"):
        await anext(case.run(1, health=HealthCheck(raise_if_dead)))  # type: ignore[arg-type]

    async def broken(groups: Sequence[TaskGroup]) -> Sequence[Rollout]:
        raise LoopError("no such resources")

    rollouts = partial(run_rollouts, case.source, [TaskGroup("g", "task")], broken)
    with pytest.raises(LoopError, match="no such resources"):
        await anext(rollouts(health=HealthCheck(case.source.raise_if_dead)))
    case.source.raise_if_dead()  # the source lives
