"""``AGLDataSource`` over a real store: groups in any order, failures, deadlines, and policies of groups and
versions."""

import asyncio
import gc
import json
import random
import time
import weakref
from dataclasses import replace
from typing import Any

import pytest

from agl_slime.data.policy import CompleteGroup, MinimumViableGroup, RetryGroup, zero_variance
from agl_slime.data.results import Outcome, reward_of
from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.errors import DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import RemoteStore
from agl_slime.store.server import StoreService
from agl_slime.support.agl import InMemoryLightningStore, Rollout, emit_reward
from agl_slime.types import Sample
from tests.data.sources import Running
from tests.harness.datasource import QUICK
from tests.harness.stores import RESPONSE, a_turn, enqueue, enqueue_group, finish, make_span
from tests.harness.waiting import until


async def test_groups_complete_in_any_order_and_each_member_counts_once(running: Running) -> None:
    ids = [rollout_id for group in range(6) for rollout_id in await running.opened(f"g{group}", size=3)]
    random.Random(0).shuffle(ids)
    await asyncio.gather(*(finish(running.store, rollout_id, number=n) for n, rollout_id in enumerate(ids)))
    groups = await running.get(6)
    assert [len(group) for group in groups] == [3] * 6
    samples = [sample for group in groups for sample in group]
    assert sorted(sample.metadata["agl_rollout_id"] for sample in samples) == sorted(ids)
    assert [sample.group_index for sample in samples] == [number for number in range(6) for _ in range(3)]
    assert [sample.index for sample in samples] == list(range(18))
    assert len({sample.rollout_id for sample in samples}) == 18
    assert all(len({sample.metadata["group_id"] for sample in group}) == 1 for group in groups)
    for sample in samples:
        assert (sample.tokens[-2:], sample.status) == (list(RESPONSE), Sample.Status.COMPLETED)
    assert running.counts == {Outcome.TRAINED: 18}
    assert running.source.ledger.counts().open == 0


async def test_samples_of_a_forked_rollout_share_its_id_and_others_do_not(running: Running) -> None:
    forked, straight = await running.opened(size=2)
    await running.finish([forked], turns=[a_turn(0), a_turn(1)])
    await running.finish([straight])
    [group] = await running.get()
    assert [sample.metadata["agl_rollout_id"] for sample in group] == [forked, forked, straight]
    assert [sample.index for sample in group] == [0, 1, 2]
    first, sibling, other = (sample.rollout_id for sample in group)
    assert first == sibling != other


async def test_a_group_with_too_many_failures_is_dropped_and_the_others_come() -> None:
    with Running(settings=replace(QUICK, policy=MinimumViableGroup(drop_early=False))) as running:
        bad, good = await running.opened("bad", size=4), await running.opened("good", size=4)
        await running.finish([bad[0]])
        await running.finish([bad[1]], reward=None)
        await running.finish([bad[2]], status="failed", turns=[], reward=None)
        await running.finish([bad[3]])
        await running.finish([good[0]], turns=[])  # a reward, but nothing was sampled
        await running.finish(good[1:])
        [group] = await running.get_ids(2)  # of two, one can come: it does not wait for the deadline
        assert set(group) == set(good[1:])
        await running.until_groups(2)  # the listener hears of a group after the trainer may take it
        await running.until_members(8)
        assert {result.group_id: (result.ready, result.reason) for result in running.listener.groups} == {
            "bad": (False, "2 of 4 rollouts succeeded, 3 are needed"),
            "good": (True, ""),
        }
        assert sorted(map(str, running.listener.failures)) == ["failed", "no_reward", "no_turns"]
        assert running.counts == {Outcome.FAILED: 3, Outcome.FILTERED: 2, Outcome.TRAINED: 3}
        assert running.reason(Outcome.FILTERED, "group_incomplete") == 2


async def test_second_process_trains_on_the_name_of_the_first_drawn_rollout() -> None:
    """slime's RolloutManager follows a store whose rollouts another process enqueues and announces to itself."""
    store = BridgeStore()
    with StoreService(store=store) as service, Running(store) as driver:
        manager = GroupSource(store=RemoteStore(service.url), settings=QUICK, n_samples_per_prompt=4)
        try:
            manager.follower.begin()
            dead, first, *late = await driver.opened("g", size=4)
            await driver.finish(late, reward={"format": 0.0, "score": -1.0})
            await until(lambda: len(manager.ingestor._waiting) == 2)
            await driver.finish([dead], reward=None)
            await driver.finish([first], reward={"score": 0.5, "format": 1.0})
            await until(lambda: manager.ingestor.run_key is not None)
            assert manager.ingestor.run_key == driver.source.ingestor.run_key == "score"
        finally:
            manager.stop()


@pytest.mark.parametrize(("name", "declared"), [("score", None), ("primary", None), ("score", "format")])
async def test_one_name_is_trained_in_a_run_whatever_the_order_of_dicts_and_ends(name: str, declared: str | None):
    """It is declared, or the first of the first drawn rollout that has names; a checkpoint keeps it."""
    right, early, other = {name: 0.5, "format": 1.0}, {"format": 0.0, name: -1.0}, {"acc": 1.0, "style": 2.0}
    with Running(
        reward_key=declared, settings=replace(QUICK, policy=MinimumViableGroup(min_ratio=0.5, drop_early=False))
    ) as running:
        dead, first, *late = await running.opened("g", size=5)
        await running.finish(late[:2], reward=early)
        await running.finish(late[2:], reward=other)
        await running.finish([first], reward=right)
        await running.finish([dead], reward=None)
        await running.until_members(5)
        key = declared or name
        values = {member.rollout_id: (member.reward, [*member.rewards][:1]) for member in running.listener.members}
        failed = {dead: (None, []), late[2]: (None, [])}
        assert values == failed | {first: (right[key], [key])} | dict.fromkeys(late[:2], (early[key], [key]))
        [failed] = [member for member in running.listener.members if member.rollout_id == late[2]]
        assert f"no reward named '{key}', only acc, style" in failed.failure_message
        [group] = await running.get()
        assert sorted(reward_of(sample) for sample in group) == sorted([right[key], early[key], early[key]])
        state = json.loads(json.dumps(running.source.state()))
    with Running(reward_key=declared) as resumed:
        resumed.source.restore(state)
        [one, plain] = await resumed.opened("h", size=2)
        await resumed.finish([one], reward=early)
        await resumed.finish([plain], reward=0.25)
        await resumed.until_members(2)
        assert [member.reward for member in resumed.listener.members] == [early[key], None if declared else 0.25]


async def test_unannounced_rollouts_are_grouped_by_their_metadata() -> None:
    with Running(n_samples_per_prompt=2) as running:
        by_size = await enqueue(running.store, 3, group_id="of three", size=3)
        by_default = await enqueue(running.store, 2, group_id="of the default")
        await running.finish([by_size[0], by_default[0], by_size[1], by_default[1], by_size[2]])
        assert [len(group) for group in await running.get(2)] == [2, 3]


async def test_get_waits_for_rollouts_in_flight_only(running: Running) -> None:
    (first,), (second,) = await running.opened("a"), await running.opened("b")
    await running.finish([first])
    waiting = asyncio.ensure_future(running.get(2))
    done, _ = await asyncio.wait({waiting}, timeout=0.3)
    assert not done  # b is in flight
    await running.finish([second])
    assert len(await asyncio.wait_for(waiting, 10)) == 2


async def test_a_surplus_comes_oldest_first_and_returned_groups_before_it(running: Running) -> None:
    ids = await enqueue(running.store, 5)
    for number, rollout_id in enumerate(ids, 1):
        await running.finish([rollout_id])
        await running.until_groups(number)
    assert len(running.source) == 5
    first, second, third = await running.get(3)
    running.source.add_samples([first, second])
    running.source.add_samples([third])
    taken = [rollout_id for n in (2, 3) for [rollout_id] in await running.get_ids(n)]
    assert taken == [ids[2], ids[0], ids[1], ids[3], ids[4]]
    assert running.counts == {Outcome.TRAINED: 5}  # however often one was handed out


async def test_get_timeout_error_counts_rollouts_in_flight() -> None:
    with Running(settings=DataSourceSettings(get_timeout_s=0.3, policy=CompleteGroup())) as running:
        await running.opened()
        good, bad = await running.opened("h", size=2)
        await running.finish([good])
        await running.finish([bad], reward=float("nan"))
        await running.until_groups()
        began = time.monotonic()
        error = r"0\.3 s.*1 rollouts in flight.*1 failed \(bad_reward\), 1 filtered"
        with pytest.raises(DataSourceError, match=error):
            await running.get()
        assert time.monotonic() - began < 5
        await running.finish(await enqueue(running.store, 1))
        await running.until_groups(2)
        assert len(await running.get(3)) == 1  # the deadline hands out fewer, not none


async def test_validation_rollouts_are_scored_and_never_trained(running: Running) -> None:
    running.source.expect("v", size=1, mode="val")
    ids = await enqueue(running.store, 1, group_id="v", mode="train")  # the announcement decides
    for mode in ("val", "test", "train"):
        ids += await enqueue(running.store, 1, mode=mode)
    await running.finish(ids, reward=0.75)
    await running.until_groups(4)
    assert await running.get_ids(4) == [[ids[3]]]
    assert [member.reward for member in running.listener.members] == [0.75] * 4
    assert running.counts == {Outcome.VALIDATED: 3, Outcome.TRAINED: 1}


async def test_a_second_report_of_a_rollout_is_ignored(running: Running) -> None:
    [rollout_id] = await enqueue(running.store, 1)
    attempt_id = await finish(running.store, rollout_id, status="failed", reward=None)
    await running.until_groups(1)
    # the agent that the watchdog gave up comes back after all
    await running.store.update_attempt(rollout_id, attempt_id, status="succeeded")
    running.source.notify(rollout_id)
    [second] = await enqueue(running.store, 1)
    await running.finish([second])
    await running.until_groups(2)
    assert [member.rollout_id for member in running.listener.members] == [rollout_id, second]
    assert running.counts == {Outcome.FAILED: 1}
    assert len(running.source) == 1


async def test_a_retried_attempt_counts_once_with_the_last_spans(running: Running) -> None:
    ids = await enqueue(running.store, 1, max_attempts=3)
    for number in (1, 2):
        await running.finish(ids, status="failed", reward=-5.0, number=number)
    running.source.notify(ids[0])
    await running.finish(ids, reward=2.0, number=3)
    [[sample]] = await running.get()
    assert (sample.reward, sample.tokens[2]) == (2.0, 103)
    assert len(running.listener.members) == 1
    assert running.counts == {Outcome.TRAINED: 1}


async def test_spans_that_the_store_dropped_fail_the_rollout_with_that_reason() -> None:
    store = InMemoryLightningStore(thread_safe=True, eviction_memory_threshold=3_000, safe_memory_threshold=100)
    with Running(store) as running:
        running.source.follower.begin()
        await running.finish(await enqueue(store, 1), turns=[a_turn(i) for i in range(10)])
        await running.until_groups()
        assert running.listener.failures == ["spans_evicted"]
        assert running.counts == {Outcome.FAILED: 1}


async def test_a_conversion_that_breaks_fails_one_rollout_and_not_the_run() -> None:
    class BrokenTokenizer:
        """Cannot tokenize text, which a rollout whose spans have ids does not need."""

        def encode(self, *_: Any, **__: Any) -> Any:
            raise ZeroDivisionError("broken tokenizer")

        apply_chat_template = __call__ = encode

        def decode(self, *_: Any, **__: Any) -> str:
            return "hello"

    messages = (("prompt.0.role", "user"), ("prompt.0.content", "hi"), ("completion.0.role", "assistant"))
    chat = {f"gen_ai.{key}": text for key, text in (*messages, ("completion.0.content", "hello"))}
    with Running(tokenizer=BrokenTokenizer()) as running:
        text_only, exact = await enqueue(running.store, 2)
        attempt_id = (await running.store.start_attempt(text_only)).attempt.attempt_id
        reward = emit_reward(1.0, propagate=False)
        spans = [
            make_span(text_only, attempt_id, 1, **chat, **{"gen_ai.operation.name": "chat"}),
            make_span(text_only, attempt_id, 2, **reward.attributes).model_copy(update={"name": reward.name}),
        ]
        await running.store.add_many_spans(spans)
        await running.store.update_attempt(text_only, attempt_id, status="succeeded")
        await running.finish([exact])
        assert len(await running.get()) == 1
        await running.until_groups(2)
        assert running.listener.failures == ["conversion_error"]
        message = next(member.failure_message for member in running.listener.members if not member.ok)
        assert message.startswith("ZeroDivisionError: broken tokenizer (test_source_groups.py, line ")


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
