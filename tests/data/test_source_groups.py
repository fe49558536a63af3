"""``AGLDataSource`` over a real store: groups in any order, failures with their reason, what is waited for and what is
not."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from typing import Any

import pytest

from agl_slime.data.policy import CompleteGroup, MinimumViableGroup
from agl_slime.data.results import Outcome
from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.errors import DataSourceError
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import InMemoryLightningStore, Span, emit_reward
from agl_slime.types import Sample
from tests.harness.datasource import QUICK, Listener, counts_of, get
from tests.harness.stores import RESPONSE, a_turn, enqueue, finish


async def test_groups_complete_in_any_order_and_each_member_counts_once() -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=QUICK) as source:
        ids: list[str] = []
        for group in range(6):
            source.expect(f"g{group}", size=3)
            ids += await enqueue(store, 3, group_id=f"g{group}", size=3)
        source.opened(ids)
        random.Random(0).shuffle(ids)
        await asyncio.gather(*(finish(store, rollout_id, number=number) for number, rollout_id in enumerate(ids)))
        groups = await get(source, 6)
        assert [len(group) for group in groups] == [3] * 6
        samples = [sample for group in groups for sample in group]
        assert sorted(sample.metadata["agl_rollout_id"] for sample in samples) == sorted(ids)
        assert [sample.group_index for sample in samples] == [number for number in range(6) for _ in range(3)]
        assert [sample.index for sample in samples] == list(range(18))
        assert len({sample.rollout_id for sample in samples}) == 18
        for group in groups:
            assert len({sample.metadata["group_id"] for sample in group}) == 1
        assert all(
            sample.tokens[-2:] == list(RESPONSE) and sample.status is Sample.Status.COMPLETED for sample in samples
        )
        assert counts_of(source) == {Outcome.TRAINED: 18}
        assert source.ledger.counts().open == 0


async def test_a_group_with_too_many_failures_is_dropped_and_the_others_come() -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=replace(QUICK, policy=MinimumViableGroup(drop_early=False))) as source:
        told = Listener(source)
        bad, good = [], []
        for group, ids in (("bad", bad), ("good", good)):
            source.expect(group, size=4)
            ids += await enqueue(store, 4, group_id=group, size=4)
            source.opened(ids)
        await finish(store, bad[0])
        await finish(store, bad[1], reward=None)
        await finish(store, bad[2], status="failed", turns=[], reward=None)
        await finish(store, bad[3])
        await finish(store, good[0], turns=[])  # a reward, but nothing was sampled
        for rollout_id in good[1:]:
            await finish(store, rollout_id)
        [group] = await get(source, 2)  # two wanted, one can come: it does not wait for the deadline
        assert {sample.metadata["agl_rollout_id"] for sample in group} == set(good[1:])
        assert [(one.group_id, one.ready, one.reason) for one in told.groups] == [
            ("bad", False, "2 of 4 rollouts succeeded, 3 are needed"),
            ("good", True, ""),
        ]
        assert sorted(map(str, told.failures)) == ["failed", "no_reward", "no_turns"]
        assert counts_of(source) == {Outcome.FAILED: 3, Outcome.FILTERED: 2, Outcome.TRAINED: 3}
        assert source.ledger.counts().reasons[Outcome.FILTERED, "group_incomplete"] == 2


async def test_with_complete_groups_one_failure_drops_the_group() -> None:
    store = BridgeStore()
    settings = DataSourceSettings(get_timeout_s=0.2, policy=CompleteGroup())
    with GroupSource(store=store, settings=settings) as source:
        told = Listener(source)
        source.expect("g", size=2)
        one, other = await enqueue(store, 2, group_id="g", size=2)
        await finish(store, one)
        await finish(store, other, reward=float("nan"))
        await told.until(lambda: bool(told.groups))
        with pytest.raises(
            DataSourceError,
            match=r"0 rollouts in flight.*1 failed \(bad_reward\), 1 filtered",
        ):
            await get(source, 1)


async def test_unannounced_rollouts_are_grouped_by_their_metadata() -> None:
    store = BridgeStore()
    with GroupSource(store=store, n_samples_per_prompt=2, settings=QUICK) as source:
        by_size = await enqueue(store, 3, group_id="says-three", size=3)
        by_default = await enqueue(store, 2, group_id="says-nothing")
        for rollout_id in [by_size[0], by_default[0], by_size[1], by_default[1], by_size[2]]:
            await finish(store, rollout_id)
        assert [len(group) for group in await get(source, 2)] == [2, 3]


async def test_get_waits_for_rollouts_in_flight_only() -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=QUICK) as source:
        ids = []
        for group in ("a", "b"):
            source.expect(group, size=1)
            ids += await enqueue(store, 1, group_id=group, size=1)
        source.opened(ids)
        await finish(store, ids[0])
        waiting = asyncio.ensure_future(get(source, 2))
        done, _ = await asyncio.wait({waiting}, timeout=0.3)
        assert not done  # b is in flight
        await finish(store, ids[1])
        assert len(await asyncio.wait_for(waiting, 10)) == 2


async def test_a_surplus_is_kept_for_the_next_call_oldest_first() -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=QUICK) as source:
        told = Listener(source)
        ids = await enqueue(store, 5)
        for number, rollout_id in enumerate(ids, 1):
            await finish(store, rollout_id)
            await told.until(lambda n=number: len(told.groups) == n)
        assert len(source) == 5
        taken = [sample.metadata["agl_rollout_id"] for n in (2, 3) for [sample] in await get(source, n)]
        assert taken == ids


async def test_groups_given_back_come_first_and_in_order() -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=QUICK) as source:
        told = Listener(source)
        for rollout_id in await enqueue(store, 4):
            await finish(store, rollout_id)
        await told.until(lambda: len(told.groups) == 4)
        first, second, third = await get(source, 3)
        source.add_samples([first, second])
        source.add_samples([third])
        assert [group[0].index for group in await get(source, 4)] == [
            third[0].index,
            first[0].index,
            second[0].index,
            3,
        ]
        assert counts_of(source) == {Outcome.TRAINED: 4}  # however often it was handed out


async def test_get_timeout_error_counts_rollouts_in_flight() -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=DataSourceSettings(get_timeout_s=0.2)) as source:
        source.expect("g", size=1)
        source.opened(await enqueue(store, 1, group_id="g"))
        began = time.monotonic()
        with pytest.raises(DataSourceError, match=r"0\.2 s.*1 rollouts in flight"):
            await get(source, 1)
        assert time.monotonic() - began < 5


async def test_some_at_the_deadline_are_handed_out() -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=DataSourceSettings(get_timeout_s=0.5)) as source:
        told = Listener(source)
        source.opened(await enqueue(store, 1, group_id="never"))
        [done] = await enqueue(store, 1)
        await finish(store, done)
        await told.until(lambda: len(told.groups) == 1)
        assert len(await get(source, 3)) == 1


async def test_without_blocking_it_returns_at_once() -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=DataSourceSettings(blocking=False)) as source:
        source.opened(await enqueue(store, 1))
        assert source.get_samples(4) == []


async def test_validation_rollouts_are_scored_and_never_trained() -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=QUICK) as source:
        told = Listener(source)
        source.expect("v", size=1, mode="val")
        ids = (
            await enqueue(store, 1, group_id="v", mode="val")
            + await enqueue(store, 1, mode="val")
            + await enqueue(store, 1, mode="test")
        )
        ids += await enqueue(store, 1)
        for rollout_id in ids:
            await finish(store, rollout_id, reward=0.75)
        await told.until(lambda: len(told.groups) == 4)
        [[sample]] = await get(source, 4)
        assert sample.metadata["agl_rollout_id"] == ids[3]
        assert [member.reward for member in told.members] == [0.75] * 4
        assert counts_of(source) == {Outcome.VALIDATED: 3, Outcome.TRAINED: 1}


async def test_a_second_report_of_a_rollout_is_ignored() -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=QUICK) as source:
        told = Listener(source)
        [rollout_id] = await enqueue(store, 1)
        attempt_id = await finish(store, rollout_id, status="failed", reward=None)
        await told.until(lambda: bool(told.groups))
        # the agent that the watchdog gave up comes back after all
        await store.update_attempt(rollout_id, attempt_id, status="succeeded")
        source.notify(rollout_id)
        [other] = await enqueue(store, 1)
        await finish(store, other)
        await told.until(lambda: len(told.groups) == 2)
        assert [member.rollout_id for member in told.members] == [rollout_id, other]
        assert counts_of(source) == {Outcome.FAILED: 1}
        assert len(source) == 1


async def test_an_attempt_that_is_tried_again_counts_once_with_the_last_spans() -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=QUICK) as source:
        told = Listener(source)
        [rollout_id] = await enqueue(store, 1, max_attempts=3)
        await finish(store, rollout_id, status="failed", reward=-5.0, number=1)
        await finish(store, rollout_id, status="failed", reward=-5.0, number=2)
        source.notify(rollout_id)
        await finish(store, rollout_id, reward=2.0, number=3)
        [[sample]] = await get(source, 1)
        assert (sample.reward, sample.tokens[2]) == (2.0, 103)
        assert len(told.members) == 1
        assert counts_of(source) == {Outcome.TRAINED: 1}


async def test_spans_that_the_store_dropped_fail_the_rollout_with_that_reason() -> None:
    store = InMemoryLightningStore(thread_safe=True, eviction_memory_threshold=3_000, safe_memory_threshold=100)
    with GroupSource(store=store, settings=QUICK) as source:
        told = Listener(source)
        source.follower.begin()
        [rollout_id] = await enqueue(store, 1)
        await finish(store, rollout_id, turns=[a_turn(i) for i in range(10)])
        await told.until(lambda: bool(told.groups))
        assert told.failures == ["spans_evicted"]
        assert counts_of(source) == {Outcome.FAILED: 1}


async def test_a_conversion_that_breaks_fails_one_rollout_and_not_the_run() -> None:
    class BrokenTokenizer:
        """Cannot tokenize text, which a rollout whose spans have ids does not need."""

        def encode(self, *_: Any, **__: Any) -> Any:
            raise ZeroDivisionError("broken tokenizer")

        apply_chat_template = __call__ = encode

        def decode(self, *_: Any, **__: Any) -> str:
            return "hello"

    store = BridgeStore()
    with GroupSource(store=store, settings=QUICK, tokenizer=BrokenTokenizer()) as source:
        told = Listener(source)
        text_only, exact = await enqueue(store, 2)
        attempted = await store.start_attempt(text_only)
        chat: dict[str, Any] = {
            "gen_ai.prompt.0.role": "user",
            "gen_ai.prompt.0.content": "hi",
            "gen_ai.completion.0.role": "assistant",
        }
        chat |= {"gen_ai.completion.0.content": "hello", "gen_ai.operation.name": "chat"}
        core = emit_reward(1.0, propagate=False)
        spans = [
            Span.from_attributes(
                name=name,
                attributes=attributes,
                rollout_id=text_only,
                attempt_id=attempted.attempt.attempt_id,
                sequence_id=i + 1,
                start_time=i,
            )
            for i, (name, attributes) in enumerate(
                [("openai.chat.completion", chat), (core.name, dict(core.attributes))]
            )
        ]
        await store.add_many_spans(spans)
        await store.update_attempt(text_only, attempted.attempt.attempt_id, status="succeeded")
        await finish(store, exact)
        assert len(await get(source, 1)) == 1
        await told.until(lambda: len(told.groups) == 2)
        assert told.failures == ["conversion_error"]
        message = next(member.failure_message for member in told.members if not member.ok)
        assert message.startswith("ZeroDivisionError: broken tokenizer (test_source_groups.py, line ")


async def test_cancelled_rollouts_are_counted_as_such() -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=QUICK) as source:
        told = Listener(source)
        source.expect("g", size=1)
        [rollout_id] = await enqueue(store, 1, group_id="g")
        source.opened([rollout_id])
        await store.update_rollout(rollout_id, status="cancelled")
        await told.until(lambda: bool(told.groups))
        assert counts_of(source) == {Outcome.CANCELLED: 1}


async def test_member_of_an_open_group_is_announced_once() -> None:
    store = BridgeStore()
    with GroupSource(store=store, settings=QUICK) as source:
        told = Listener(source)
        ids = await enqueue(store, 2, group_id="g", size=2)
        source.opened(ids)
        await finish(store, ids[0])
        await told.until(lambda: len(told.members) == 1)
        other = await enqueue(store, 1, group_id="other", size=1)
        for _ in range(3):
            source.notify(ids[0])
        await finish(store, other[0])  # behind the three in the queue
        await finish(store, ids[1])
        await told.until(lambda: len(told.groups) == 2)
        assert sorted(member.rollout_id for member in told.members) == sorted([*ids, *other])
