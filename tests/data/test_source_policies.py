"""What a data source does about groups that are late, failing, all alike or of foreign weights, over a real store."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from dataclasses import replace

import pytest

from agl_slime.data.policy import GroupPolicy, MinimumViableGroup, RetryGroup, zero_variance
from agl_slime.data.results import Outcome
from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.errors import DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import Rollout
from tests.harness.datasource import Listener, counts_of, get
from tests.harness.stores import a_turn, enqueue, enqueue_group, finish

SETTINGS = DataSourceSettings(get_timeout_s=20.0, poll_interval_s=0.01)


def source_over(store: BridgeStore, *, policy: GroupPolicy | None = None, filtered: bool = False) -> GroupSource:
    settings = replace(SETTINGS, group_filter=zero_variance if filtered else None)
    return GroupSource(store=store, settings=settings if policy is None else replace(settings, policy=policy))


async def opened(
    source: GroupSource, store: BridgeStore, group_id: str, *, size: int, instance_id: str | None = None
) -> list[str]:
    source.expect(group_id, size=size)
    rollouts = await enqueue_group(store, group_id, size=size, instance_id=instance_id)
    source.opened(rollouts)
    return [rollout.rollout_id for rollout in rollouts]


async def cancelled_in(store: BridgeStore, rollout_id: str) -> bool:
    """Waits until the store says that the rollout is cancelled."""
    ended: asyncio.Queue[Rollout] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def tell(rollout: Rollout) -> None:
        loop.call_soon_threadsafe(ended.put_nowait, rollout)

    unsubscribe = store.subscribe_finished(tell)
    try:
        while True:
            rollout = await store.get_rollout_by_id(rollout_id)
            if rollout is not None and rollout.status == "cancelled":
                return True
            await asyncio.wait_for(ended.get(), timeout=20)
    finally:
        unsubscribe()


async def test_a_group_does_not_wait_for_its_last_member_for_ever() -> None:
    store = BridgeStore()
    with source_over(store, policy=MinimumViableGroup(min_ratio=0.5, timeout_s=0.2)) as source:
        told = Listener(source)
        ids = await opened(source, store, "g", size=4)
        for rollout_id in ids[:3]:
            await finish(store, rollout_id)
        [group] = await get(source, 1)
        assert {sample.metadata["agl_rollout_id"] for sample in group} == set(ids[:3])
        assert await cancelled_in(store, ids[3])
        await told.until(lambda: len(told.members) == 4)
        assert told.failures == ["group_timeout"]
        await finish(store, ids[3], status="succeeded")  # it ends all the same
        source.notify(ids[3])
        other = await opened(source, store, "h", size=1)
        await finish(store, other[0])
        await get(source, 1)
        assert counts_of(source) == {Outcome.TRAINED: 4, Outcome.CANCELLED: 1}
        assert source.metrics()["agl/cancelled/group_timeout"] == 1


async def test_the_first_failure_ends_a_group_that_cannot_be_used_any_more() -> None:
    store = BridgeStore()
    with source_over(store, policy=MinimumViableGroup(min_ratio=1.0)) as source:
        told = Listener(source)
        ids = await opened(source, store, "g", size=3, instance_id="7")
        await finish(store, ids[0])
        await finish(store, ids[1], status="failed", reward=None)
        await told.until(lambda: len(told.groups) == 1)
        assert await cancelled_in(store, ids[2])
        assert (told.groups[0].ready, told.groups[0].code) == (False, "floor_out_of_reach")
        assert counts_of(source) == {Outcome.FAILED: 1, Outcome.FILTERED: 1, Outcome.CANCELLED: 1}
        assert source.ledger.finished_instances() == ["7"]
        late = await enqueue_group(store, "g", size=1)
        source.opened(late)  # one that was on its way to the store when its group settled
        assert await cancelled_in(store, late[0].rollout_id)
        assert source.ledger.counts().reasons[Outcome.CANCELLED, "group_finalized"] == 1


async def test_failed_members_are_run_again_and_the_group_is_complete() -> None:
    store = BridgeStore()
    with source_over(store, policy=RetryGroup(max_retries=2)) as source:
        told = Listener(source)
        ids = await opened(source, store, "g", size=2, instance_id="3")
        await finish(store, ids[0])
        await finish(store, ids[1], status="failed", reward=None)
        await told.until(lambda: len(told.members) == 2)
        for status in ("failed", "succeeded"):
            again = await _next_queued(store, not_among=ids)
            assert again.metadata is not None
            assert (again.input, again.metadata["instance_id"], again.metadata["group_id"]) == ({"n": 1}, "3", "g")
            await finish(store, again.rollout_id, status=status, reward=1.0 if status == "succeeded" else None)
            ids.append(again.rollout_id)
        [group] = await get(source, 1)
        assert [sample.metadata["agl_rollout_id"] for sample in group] == [ids[0], ids[3]]
        assert counts_of(source) == {Outcome.FAILED: 2, Outcome.TRAINED: 2}
        assert source.ledger.counts().opened == 4
        assert source.ledger.finished_instances() == ["3"]


async def test_groups_whose_rewards_are_all_the_same_can_be_left_out() -> None:
    store = BridgeStore()
    with source_over(store, filtered=True) as source:
        told = Listener(source)
        same = await opened(source, store, "same", size=2)
        differs = await opened(source, store, "differs", size=2)
        for rollout_id in same:
            await finish(store, rollout_id, reward=1.0)
        for reward, rollout_id in enumerate(differs):
            await finish(store, rollout_id, reward=float(reward))
        [group] = await get(source, 2)
        assert {sample.metadata["agl_rollout_id"] for sample in group} == set(differs)
        assert [(one.group_id, one.code) for one in told.groups] == [("same", "zero_variance"), ("differs", "")]
        assert source.ledger.counts().reasons[Outcome.FILTERED, "zero_variance"] == 2


async def sampled(source: GroupSource, store: BridgeStore, group_id: str, *versions: str) -> list[str]:
    """A group whose members were sampled by weights of these versions."""
    ids = await opened(source, store, group_id, size=len(versions), instance_id=group_id)
    for rollout_id, version in zip(ids, versions, strict=True):
        await finish(store, rollout_id, turns=[a_turn(version=version)])
    return ids


async def test_tokens_of_weights_that_the_run_did_not_push_are_not_trained_on(caplog: pytest.LogCaptureFixture) -> None:
    store = BridgeStore()
    with source_over(store) as source:
        source.set_version("0")
        await sampled(source, store, "a", "0", "0")
        assert len(await get(source, 1)) == 1
        source.set_version("1")
        await sampled(source, store, "b", "1", "evil")
        kept = await sampled(source, store, "c", "0", "1")  # both are the run's own
        groups = await get(source, 2)
        assert [{sample.metadata["agl_rollout_id"] for sample in group} for group in groups] == [set(kept)]
        counts = source.ledger.counts()
        assert counts.reasons[Outcome.FAILED, "foreign_weights"] == 2
        assert counts.closed[Outcome.TRAINED] == 4
        assert sorted(source.ledger.finished_instances()) == ["a", "b", "c"]
        assert "'evil'" in caplog.text
        assert "'1'" in caplog.text
        await sampled(source, store, "d", "evil", "evil")
        with pytest.raises(
            DataSourceError, match=r"version 'evil', which this run did not push \(its current version is '1'"
        ):
            await get(source, 1)


async def test_versions_pushed_before_a_restart_stay_known() -> None:
    store = BridgeStore()
    with source_over(store) as first:
        for version in ("0", "1", "2"):
            first.set_version(version)
        state = json.loads(json.dumps(first.state()))
    with source_over(store) as source:
        source.restore(state)
        source.set_version("2")
        await sampled(source, store, "a", "1", "2")
        assert len(await get(source, 1)) == 1
        await sampled(source, store, "b", "default", "2")
        with pytest.raises(DataSourceError, match="'default'"):
            await get(source, 1)


async def test_after_named_initial_version_unknown_versions_are_refused_at_once() -> None:
    store = BridgeStore()
    with source_over(store) as source:
        source.set_version("0", named=True)
        source.set_version("0")  # as the loop says it
        await sampled(source, store, "a", "0", "0")
        assert len(await get(source, 1)) == 1
        await sampled(source, store, "b", "evil", "0")
        with pytest.raises(DataSourceError, match=r"version 'evil', which this run did not push"):
            await get(source, 1)


async def test_an_engine_names_the_weights_that_it_begins_with_as_it_likes() -> None:
    store = BridgeStore()
    with source_over(store) as source:
        source.set_version("0")  # a program that pushes nothing before the first step
        await sampled(source, store, "a", "default", "default")
        assert len(await get(source, 1)) == 1
        source.set_version("1")
        await sampled(source, store, "b", "default", "1")
        assert len(await get(source, 1)) == 1


async def test_policy_version_is_taken_from_samples_when_not_set() -> None:
    store = BridgeStore()
    with source_over(store) as source:
        told = Listener(source)
        for rollout_id, version in zip(await enqueue(store, 2), ("1", "2"), strict=True):
            await finish(store, rollout_id, turns=[a_turn(version=version)])
        await told.until(lambda: len(told.members) == 2)
        assert [group[0].metadata["policy_version"] for group in await get(source, 2)] == [2, 2]


async def test_groups_that_are_given_back_keep_their_rollouts_and_their_instance() -> None:
    store = BridgeStore()
    with source_over(store) as source:
        ids = await opened(source, store, "g", size=2, instance_id="9")
        for rollout_id in ids:
            await finish(store, rollout_id)
        groups = await get(source, 1)
        source.add_samples(groups)
        state = source.state()
        assert (state["members"], state["instances"]) == ([ids], ["9"])
        assert await get(source, 1) == groups
        assert source.ledger.finished_instances() == ["9"]
        assert counts_of(source) == {Outcome.TRAINED: 2}


async def test_samples_that_were_handed_out_are_not_kept() -> None:
    store = BridgeStore()
    with source_over(store) as source:
        for group_id in ("first", "second"):
            for rollout_id in await opened(source, store, group_id, size=2):
                await finish(store, rollout_id)
        [group] = await get(source, 1)
        samples = [weakref.ref(sample) for sample in group]
        del group
        await get(source, 1)  # asyncio keeps the result of the last call
        gc.collect()
        assert [sample() for sample in samples] == [None, None]


async def _next_queued(store: BridgeStore, *, not_among: list[str]) -> Rollout:
    """The rollout that the data source enqueues; it does so on its own thread."""
    for _ in range(2000):
        for rollout in await store.query_rollouts(status_in=["queuing"]):
            if rollout.rollout_id not in not_among:
                return rollout
        await asyncio.sleep(0.01)
    raise AssertionError("nothing was enqueued again")
