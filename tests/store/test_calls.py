"""Equal histories through ``BridgeStore`` and Agent Lightning's store: every later query has the same answer."""

import itertools
import random
import time
from typing import Any

import pytest
from pydantic import BaseModel

from agl_slime.store.bridge import FINISHED, BridgeStore
from agl_slime.support.agl import LLM, EnqueueRolloutRequest, InMemoryLightningStore, RolloutConfig, Span
from tests.harness.examples import examples
from tests.harness.stores import claim, enqueue, enqueue_inputs

STATUSES = ["preparing", "running", "succeeded", "failed", "failed", "timeout", "unresponsive"]
RETRIES: list[list[Any]] = [[], ["failed"], *[["failed", "timeout", "unresponsive"]] * 2]
ROLLOUTS = 6


def a_step(rng: random.Random) -> tuple[Any, ...]:
    """A call with its rollout and the place of its attempt; -1 is the latest."""
    rollout, place = rng.randrange(ROLLOUTS), rng.choice([-1, 0, 0, 1, 1, 2])
    kind = rng.choices(["spans", "end", "claim", "start", "numbers", "note", "cancel"], [8, 5, 3, 1, 2, 1, 0.3])[0]
    return {
        "spans": ("spans", rollout, place, rng.sample(range(1, 10), rng.randint(1, 3))),
        "end": ("end", rollout, place, rng.choice(STATUSES)),
        "claim": ("claim", rng.randint(1, 3), rng.choice([None, "one", "two"])),
        "start": ("start", rollout, rng.choice([None, "one"])),
        "numbers": ("numbers", rng.choices(range(ROLLOUTS), k=3)),
        "note": ("note", rollout, place, rng.choice(["worker_id", "last_heartbeat_time", "metadata"])),
        "cancel": ("cancel", rollout),
    }[kind]


class Subject:
    """One store under the history. Rollouts and attempts have numbers, since each store makes up ids."""

    def __init__(self, store: InMemoryLightningStore) -> None:
        self.store = store
        self.rollouts: list[str] = []
        self.answers: list[Any] = []
        self._names: dict[str, str] = {}
        self._plain: dict[tuple[type, str], Any] = {}
        self._span_ids = itertools.count()

    async def begin(self, configs: list[RolloutConfig]) -> None:
        await self.store.add_resources({"main_llm": LLM(endpoint="http://127.0.0.1:1", model="none")})
        requests = [
            EnqueueRolloutRequest(input={"n": [n]}, mode="train", config=config) for n, config in enumerate(configs)
        ]
        self.rollouts = [rollout.rollout_id for rollout in await self.store.enqueue_many_rollouts(requests)]

    async def attempt(self, number: int, place: int) -> str:
        attempts = await self.store.query_attempts(self.rollouts[number])
        return attempts[place].attempt_id if 0 <= place < len(attempts) else "latest" if place < 0 else "at-none"

    async def do(self, step: tuple[Any, ...]) -> None:
        try:
            self.answers.append(self.plain(await self._do(*step)))
        except ValueError as error:
            self.answers.append(type(error).__name__)

    async def _do(self, kind: str, *args: Any) -> Any:
        store, rollouts = self.store, self.rollouts
        if kind == "claim":
            return await store.dequeue_many_rollouts(limit=args[0], worker_id=args[1])
        if kind == "start":
            return await store.start_attempt(rollouts[args[0]], worker_id=args[1])
        if kind == "numbers":
            return await store.get_many_span_sequence_ids([(rollouts[n], "any") for n in args[0]])
        if kind == "spans":
            number, place, spans = args
            attempt_id = await self.attempt(number, place)
            return await store.add_many_spans([self.span(rollouts[number], attempt_id, n) for n in spans])
        if kind == "cancel":
            return await store.update_rollout(rollouts[args[0]], status="cancelled")
        number, place, value = args
        rollout = await store.get_rollout_by_id(rollouts[number])
        attempt_id = await self.attempt(number, place)
        if rollout is not None and rollout.status in FINISHED:
            return None  # where an attempt ends after its rollout the two differ on purpose
        if kind == "end":
            return await store.update_attempt(rollouts[number], attempt_id, status=value)
        values: dict[str, Any] = {"worker_id": "three", "metadata": {"a": 1}, "last_heartbeat_time": 5.0}
        return await store.update_attempt(rollouts[number], attempt_id, **{value: values[value]})

    def span(self, rollout_id: str, attempt_id: str, number: int) -> Span:
        key: dict[str, Any] = {"rollout_id": rollout_id, "attempt_id": attempt_id, "sequence_id": number}
        ids: dict[str, Any] = {"trace_id": "t", "span_id": f"span-{next(self._span_ids)}"}
        return Span.from_attributes(**key, **ids, start_time=1.0, name="x", attributes={"n": number})

    async def state(self) -> Any:
        """The answers to all queries."""
        store = self.store
        answers: list[Any] = [
            await store.query_rollouts(),
            await store.query_workers(),
            await store.get_many_span_sequence_ids([]),
        ]
        for rollout_id in self.rollouts:
            attempts = await store.query_attempts(rollout_id)
            answers += [await store.get_rollout_by_id(rollout_id), await store.get_latest_attempt(rollout_id), attempts]
            answers += [await store.query_spans(rollout_id), await store.query_spans(rollout_id, "latest")]
            answers += [await store.query_spans(rollout_id, attempt.attempt_id) for attempt in attempts]
        statistics = {**await store.statistics(), "total_span_bytes": 0}
        counts = {name: value for name, value in statistics.items() if name.startswith("total_")}
        running = [rollout_id in store._running_rollout_ids for rollout_id in self.rollouts]
        return self.plain([*answers, counts, running])

    def plain(self, value: Any) -> Any:
        """``value`` without pydantic, with ids by the order in which they were seen, and times only as there or not."""
        if isinstance(value, BaseModel):  # most have been seen before, after an earlier step
            key = type(value), value.model_dump_json()
            if key not in self._plain:
                self._plain[key] = self.plain(value.model_dump())
            return self._plain[key]
        if isinstance(value, dict):
            return {
                name: value[name] is not None if name.endswith("_time") else self.plain(value[name])
                for name in sorted(value)
            }
        if isinstance(value, (list, tuple)):
            return [self.plain(item) for item in value]
        if isinstance(value, str) and value.startswith(("ro-", "at-", "rs-")):
            return self._names.setdefault(value, f"{value[:3]}{len(self._names)}")
        return value


@pytest.mark.parametrize("seed", range(examples(40)))
async def test_both_stores_tell_the_same(seed: int) -> None:
    rng = random.Random(seed)
    configs = [
        RolloutConfig(max_attempts=rng.choice([1, 2, 3, 3]), retry_condition=rng.choice(RETRIES))
        for _ in range(ROLLOUTS)
    ]
    subjects = [Subject(InMemoryLightningStore(thread_safe=True)), Subject(BridgeStore(dead_worker_seconds=0))]
    for subject in subjects:
        await subject.begin(configs)
    history = [("claim", 4, "one"), *(a_step(rng) for _ in range(60))]
    for step in history:
        for subject in subjects:
            await subject.do(step)
        stock, bridge = (subject.answers[-1] for subject in subjects)
        assert bridge == stock, step
        stock, bridge = [await subject.state() for subject in subjects]
        assert bridge == stock, step


async def claimed(store: BridgeStore) -> tuple[str, str]:
    await enqueue(store)
    rollout = await claim(store)
    return rollout.rollout_id, rollout.attempt.attempt_id


async def test_of_spans_with_one_id_the_first_is_kept() -> None:
    store = BridgeStore()
    rollout_id, attempt_id = await claimed(store)

    def span(name: str, span_id: str) -> Span:
        return Span.from_attributes(
            rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=1, name=name, span_id=span_id, attributes={}
        )

    first = [span("a", "1"), span("b", "2")]
    assert await store.add_many_spans(first) == first
    assert [s.name for s in await store.add_many_spans([span("late", "1"), span("c", "3")])] == ["c"]
    assert await store.add_span(span("late", "3")) is None
    assert sorted(s.name for s in await store.query_spans(rollout_id, attempt_id)) == ["a", "b", "c"]
    assert (await store.statistics()).get("total_spans") == 3


@pytest.mark.parametrize("ended", ["cancelled", "failed", "succeeded"])
async def test_an_ended_rollout_stays_ended(ended: Any) -> None:
    for late in STATUSES:
        store = BridgeStore()
        statuses: list[str] = []
        store.subscribe_finished(lambda rollout, statuses=statuses: statuses.append(rollout.status))
        rollout_id, attempt_id = await claimed(store)
        ending = await store.update_rollout(rollout_id, status=ended)
        assert (await store.update_attempt(rollout_id, attempt_id, status=late)).status == late
        rollout = await store.get_rollout_by_id(rollout_id)
        assert rollout is not None
        assert (rollout.status, rollout.end_time) == (ended, ending.end_time)
        assert statuses == [ended]
        assert await store.dequeue_rollout() is None


async def test_an_agent_that_changes_its_task_does_not_change_the_stored_one() -> None:
    store = BridgeStore()
    await enqueue_inputs(store, [{"messages": [{"content": "hi"}]}])
    rollout = await claim(store)
    rollout.input["messages"][0]["content"] = "changed"
    stored = await store.get_rollout_by_id(rollout.rollout_id)
    assert stored is not None
    assert stored.input == {"messages": [{"content": "hi"}]}


async def test_scan_before_reading_spans_finds_expired_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    store = BridgeStore(scan_debounce_seconds=0)
    await enqueue_inputs(store, [{}], timeout_seconds=5)
    rollout = await claim(store)
    later = time.time() + 10
    monkeypatch.setattr(time, "time", lambda: later)
    assert list(await store.query_spans(rollout.rollout_id, rollout.attempt.attempt_id)) == []
    assert store.collections.rollout(rollout.rollout_id).status == "failed"  # type: ignore[union-attr]
