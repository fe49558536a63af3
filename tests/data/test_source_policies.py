"""Late, failing and uniform groups, and groups of foreign weights, in a data source over a real store."""

import asyncio
import gc
import json
import weakref
from dataclasses import replace
from typing import Any

import pytest

from agl_slime.data.policy import MinimumViableGroup, RetryGroup, zero_variance
from agl_slime.data.results import Outcome
from agl_slime.errors import DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import Rollout
from tests.data.sources import Running
from tests.harness.datasource import QUICK
from tests.harness.stores import a_turn, enqueue, enqueue_group


def with_policy(policy: Any) -> Running:
    return Running(settings=replace(QUICK, policy=policy))


async def cancelled_in(store: BridgeStore, rollout_id: str) -> bool:
    """Waits until the store has the rollout as cancelled."""
    ended: asyncio.Queue[Rollout] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    unsubscribe = store.subscribe_finished(lambda rollout: loop.call_soon_threadsafe(ended.put_nowait, rollout))
    try:
        while True:
            rollout = await store.get_rollout_by_id(rollout_id)
            if rollout is not None and rollout.status == "cancelled":
                return True
            await asyncio.wait_for(ended.get(), timeout=20)
    finally:
        unsubscribe()


async def test_a_group_does_not_wait_for_its_last_member_for_ever() -> None:
    with with_policy(MinimumViableGroup(min_ratio=0.5, timeout_s=0.2)) as running:
        ids = await running.opened(size=4)
        await running.finish(ids[:3])
        [group] = await running.get_ids()
        assert set(group) == set(ids[:3])
        assert await cancelled_in(running.store, ids[3])
        await running.until_members(4)
        assert running.listener.failures == ["group_timeout"]
        await running.finish([ids[3]])  # it ends all the same
        running.source.notify(ids[3])
        await running.finish(await running.opened("h"))
        await running.get()
        assert running.counts == {Outcome.TRAINED: 4, Outcome.CANCELLED: 1}
        assert running.source.metrics()["agl/cancelled/group_timeout"] == 1


async def test_the_first_failure_ends_a_group_that_cannot_be_used_any_more() -> None:
    with with_policy(MinimumViableGroup(min_ratio=1.0)) as running:
        ids = await running.opened(size=3, instance_id="7")
        await running.finish([ids[0]])
        await running.finish([ids[1]], status="failed", reward=None)
        await running.until_groups()
        assert await cancelled_in(running.store, ids[2])
        [group] = running.listener.groups
        assert (group.ready, group.code) == (False, "floor_out_of_reach")
        assert running.counts == {Outcome.FAILED: 1, Outcome.FILTERED: 1, Outcome.CANCELLED: 1}
        assert running.source.ledger.finished_instances() == ["7"]
        late = await enqueue_group(running.store, "g", size=1)
        running.source.opened(late)  # on its way to the store when its group was finalized
        assert await cancelled_in(running.store, late[0].rollout_id)
        assert running.reason(Outcome.CANCELLED, "group_finalized") == 1


async def test_failed_members_are_run_again_and_the_group_is_complete() -> None:
    with with_policy(RetryGroup(max_retries=2)) as running:
        ids = await running.opened(size=2, instance_id="3", seed="0/train/3/0")
        await running.finish([ids[0]])
        await running.finish([ids[1]], status="failed", reward=None)
        await running.until_members(2)
        for status, reward in (("failed", None), ("succeeded", 1.0)):
            retry = await _next_queued(running.store, not_among=ids)
            assert retry.metadata is not None
            assert (retry.input, retry.metadata["instance_id"], retry.metadata["group_id"]) == ({"n": 1}, "3", "g")
            assert retry.metadata["seed"] == "0/train/3/0" + "+" * (len(ids) - 1)  # another answer
            await running.finish([retry.rollout_id], status=status, reward=reward)
            ids.append(retry.rollout_id)
        assert await running.get_ids() == [[ids[0], ids[3]]]
        assert running.counts == {Outcome.FAILED: 2, Outcome.TRAINED: 2}
        assert running.source.ledger.counts().opened == 4
        assert running.source.ledger.finished_instances() == ["3"]


async def test_groups_whose_rewards_are_all_the_same_can_be_left_out() -> None:
    with Running(settings=replace(QUICK, group_filter=zero_variance)) as running:
        same, differs = await running.opened("same", size=2), await running.opened("differs", size=2)
        await running.finish(same)
        for reward, rollout_id in enumerate(differs):
            await running.finish([rollout_id], reward=float(reward))
        [group] = await running.get_ids(2)
        assert set(group) == set(differs)
        codes = [(result.group_id, result.code) for result in running.listener.groups]
        assert codes == [("same", "zero_variance"), ("differs", "")]
        assert running.reason(Outcome.FILTERED, "zero_variance") == 2


async def sampled(running: Running, group_id: str, *versions: str) -> list[str]:
    """A group whose members were sampled by weights of these versions."""
    ids = await running.opened(group_id, size=len(versions), instance_id=group_id)
    for rollout_id, version in zip(ids, versions, strict=True):
        await running.finish([rollout_id], turns=[a_turn(version=version)])
    return ids


async def test_tokens_of_weights_that_the_run_did_not_push_are_not_trained_on(running, caplog):
    running.source.set_version("0")
    await sampled(running, "a", "0", "0")
    assert len(await running.get()) == 1
    running.source.set_version("1")
    await sampled(running, "b", "1", "evil")
    of_the_run = await sampled(running, "c", "0", "1")
    assert [set(group) for group in await running.get_ids(2)] == [set(of_the_run)]
    assert running.reason(Outcome.FAILED, "foreign_weights") == 2
    assert running.counts[Outcome.TRAINED] == 4
    assert sorted(running.source.ledger.finished_instances()) == ["a", "b", "c"]
    assert "'evil'" in caplog.text
    assert "'1'" in caplog.text
    await sampled(running, "d", "evil", "evil")
    error = r"version 'evil', which this run did not push \(its current version is '1'"
    with pytest.raises(DataSourceError, match=error):
        await running.get()


async def test_versions_pushed_before_a_restart_stay_in_the_state(running: Running) -> None:
    with Running() as first:
        for version in ("0", "1", "2"):
            first.source.set_version(version)
        running.source.restore(json.loads(json.dumps(first.source.state())))
    running.source.set_version("2")
    await sampled(running, "a", "1", "2")
    assert len(await running.get()) == 1
    await sampled(running, "b", "default", "2")
    with pytest.raises(DataSourceError, match="'default'"):
        await running.get()


@pytest.mark.parametrize("named", [True, False])
async def test_only_an_initial_version_without_a_name_may_be_any(running: Running, named: bool) -> None:
    """An engine names the weights that it starts with as it likes, unless the run has named them."""
    if named:
        running.source.set_version("0", named=True)
    running.source.set_version("0")  # a program that pushes nothing before the first step
    await sampled(running, "a", *(["0", "0"] if named else ["default", "default"]))
    assert len(await running.get()) == 1
    if named:
        await sampled(running, "b", "evil", "0")
        with pytest.raises(DataSourceError, match=r"version 'evil', which this run did not push"):
            await running.get()
    else:
        running.source.set_version("1")
        await sampled(running, "b", "default", "1")
        assert len(await running.get()) == 1


async def test_policy_version_is_taken_from_samples_when_not_set(running: Running) -> None:
    for rollout_id, version in zip(await enqueue(running.store, 2), ("1", "2"), strict=True):
        await running.finish([rollout_id], turns=[a_turn(version=version)])
    await running.until_members(2)
    assert [group[0].metadata["policy_version"] for group in await running.get(2)] == [2, 2]


async def test_returned_groups_keep_their_rollouts_and_delivered_ones_are_freed(running: Running) -> None:
    ids = await running.opened(size=2, instance_id="9")
    await running.finish(ids)
    groups = await running.get()
    running.source.add_samples(groups)
    state = running.source.state()
    assert (state["members"], state["instances"]) == ([ids], ["9"])
    assert await running.get() == groups
    assert running.source.ledger.finished_instances() == ["9"]
    assert running.counts == {Outcome.TRAINED: 2}
    samples = [weakref.ref(sample) for sample in groups[0]]
    del groups
    running.listener.members.clear()
    running.listener.groups.clear()
    await running.finish(await running.opened("second"))
    await running.get()  # asyncio keeps the result of the last call
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
