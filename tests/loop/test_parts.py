"""What happens to the run when one of its own parts breaks: trainer, store, threads, tasks; and when it is
cancelled."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from agl_slime.data import client
from agl_slime.data.results import Outcome
from agl_slime.data.source import DataSourceSettings
from agl_slime.errors import ConfigError, DataSourceError, LoopError, TrainerError
from agl_slime.events import PhaseStarted
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import InMemoryLightningStore
from tests.harness.engine_faults import Stall
from tests.harness.loop import HelloAgent, LoopCase, hello_engine, threads_of_ours
from tests.harness.scripted_engine import ScriptedEngine


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run looks for what has died four times a second."""
    monkeypatch.setattr(client, "_HEALTH_CHECK_INTERVAL_S", 0.25)


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with hello_engine() as engine:
        yield engine


def test_a_trainer_that_raises_stops_the_run_with_its_place_and_its_cause(engine: ScriptedEngine) -> None:
    def train(iteration: int) -> dict[str, float]:
        return {"train/loss": 1 / (2 - iteration)}

    with (
        LoopCase(agent=HelloAgent(), url=engine.url, train=train, num_iterations=4) as case,
        pytest.raises(
            LoopError,
            match=r"^iteration 2: training failed with ZeroDivisionError: .*\(test_parts\.py, line \d+\)$",
        ) as caught,
    ):
        case.loop.run()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert len(case.recorder.metrics) == 1
    assert case.recorder.end.reason == str(caught.value)
    assert threads_of_ours() == []


def test_package_errors_keep_their_type_and_message(engine: ScriptedEngine) -> None:
    async def train(iteration: int) -> dict[str, float]:
        raise TrainerError("the loss is NaN")

    with (
        LoopCase(agent=HelloAgent(), url=engine.url, train=train) as case,
        pytest.raises(TrainerError, match=r"^the loss is NaN$"),
    ):
        case.loop.run()


def test_a_sync_function_that_raises_is_named_too(engine: ScriptedEngine) -> None:
    def sync(iteration: int) -> str:
        raise OSError("disk full")

    sentence = r"^iteration 1: weight sync failed with OSError: disk full"
    with LoopCase(agent=HelloAgent(), url=engine.url, sync=sync) as case, pytest.raises(LoopError, match=sentence):
        case.loop.run()


def test_tasks_that_cannot_be_made_are_named(engine: ScriptedEngine) -> None:
    def make_task(rng: Any) -> dict[str, Any]:
        raise KeyError("difficulty")

    sentence = r"^iteration 1: failed with KeyError: 'difficulty' \(test_parts\.py, line"
    with (
        LoopCase(agent=HelloAgent(), url=engine.url, tasks=make_task) as case,
        pytest.raises(LoopError, match=sentence),
    ):
        case.loop.run()


def test_loop_calls_sync_and_async_functions_with_or_without_iteration(engine: ScriptedEngine) -> None:
    called: list[Any] = []

    class Callable:
        async def __call__(self, iteration: int) -> dict[str, float]:
            called.append(("object", iteration, threading.current_thread() is threading.main_thread()))
            return {"train/loss": 1.0}

    def sync_without() -> int:
        called.append(("sync", threading.current_thread() is threading.main_thread()))
        return 7

    with LoopCase(agent=HelloAgent(), url=engine.url, train=Callable(), sync=sync_without) as case:
        case.loop.run()
    assert called == [("object", 1, True), ("sync", False)]
    assert case.recorder.metrics[0]["weights/version"] == "7"


@pytest.mark.usefixtures("looks_often")
def test_a_runner_that_dies_ends_the_run(engine: ScriptedEngine) -> None:
    class NoQueue(BridgeStore):
        filled = False

        async def enqueue_many_rollouts(self, rollouts: Any) -> Any:
            self.filled = True
            return await super().enqueue_many_rollouts(rollouts)

        async def dequeue_many_rollouts(self, **_: Any) -> Any:
            if self.filled:
                raise ConnectionError("the queue is gone")
            return []

    began = time.monotonic()
    with LoopCase(agent=HelloAgent(), url=engine.url, store=NoQueue()) as case:
        with pytest.raises(LoopError, match="the runner ended: the queue is gone"):
            case.loop.run()
        case.check_ledger()
        assert case.source.ledger.counts().closed == {Outcome.CANCELLED: 4}
    assert time.monotonic() - began < 15
    assert threads_of_ours() == []


@pytest.mark.usefixtures("looks_often")
def test_a_data_source_that_dies_ends_the_run(engine: ScriptedEngine) -> None:
    class NoSpans(BridgeStore):
        async def query_spans(self, *args: Any, **kwargs: Any) -> Any:
            raise OSError("the spans are gone")

    with LoopCase(agent=HelloAgent(), url=engine.url, store=NoSpans()) as case:
        with pytest.raises(DataSourceError, match="the data source's thread ended: the spans are gone"):
            case.loop.run()
        case.check_ledger()
    assert threads_of_ours() == []


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("phase", ["collect", "train", "sync"])
def test_an_engine_that_dies_in_any_phase_ends_the_run_at_once(phase: str, engine: ScriptedEngine) -> None:
    dead = threading.Event()

    def check_alive() -> None:
        if dead.is_set():
            raise LoopError("the engine has died")

    async def hangs(iteration: int) -> None:
        dead.set()
        await asyncio.Event().wait()

    def judge(task: dict[str, Any], response: str) -> float:
        if phase == "collect":
            dead.set()
            time.sleep(0.15)  # groups go on settling, less than a look apart
        return 1.0

    with LoopCase(
        agent=HelloAgent(judge=judge),
        url=engine.url,
        train=hangs if phase == "train" else None,
        sync=hangs if phase == "sync" else None,
        rollout_batch_size=160 if phase == "collect" else 4,
        max_concurrent=2,
    ) as case:
        case.loop._check_alive = check_alive
        began = time.monotonic()
        with pytest.raises(LoopError, match=r"^the engine has died$"):
            case.loop.run()
        assert time.monotonic() - began < 10
        assert case.source.ledger.counts().open == 0


def test_a_plain_store_that_is_thread_safe_works_as_well(engine: ScriptedEngine) -> None:
    store = InMemoryLightningStore(thread_safe=True)
    with LoopCase(
        agent=HelloAgent(),
        url=engine.url,
        store=store,
        num_iterations=2,
        source_settings=DataSourceSettings(get_timeout_s=20),
    ) as case:
        case.loop.run()
        case.check_ledger()
    assert case.source.ledger.counts().closed == {Outcome.TRAINED: 8}


def test_a_store_that_is_not_thread_safe_is_refused_before_anything_starts(engine: ScriptedEngine) -> None:
    with pytest.raises(ConfigError, match=r"InMemoryLightningStore is not thread-safe; use agl_slime\.BridgeStore"):
        LoopCase(agent=HelloAgent(), url=engine.url, store=InMemoryLightningStore())
    for thread in threading.enumerate():
        assert thread.name != "agl-slime-runner"


@pytest.mark.parametrize("phase", ["collect", "train", "sync"])
async def test_cancelling_ends_it_at_once_and_every_rollout_has_an_end(phase: str) -> None:
    reached = asyncio.Event()

    async def wait_forever(iteration: int) -> None:
        reached.set()
        await asyncio.Event().wait()

    with hello_engine() as engine:
        if phase == "collect":
            engine.always("/generate", Stall())
        with LoopCase(
            agent=HelloAgent(),
            url=engine.url,
            train=wait_forever if phase == "train" else None,
            sync=wait_forever if phase == "sync" else None,
        ) as case:
            running = asyncio.ensure_future(case.loop.run_async())
            if phase == "collect":
                while engine.calls["/generate"] < 4:  # noqa: ASYNC110 - the engine has a loop of its own
                    await asyncio.sleep(0.01)
            else:
                await asyncio.wait_for(reached.wait(), 20)
            began = time.monotonic()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert time.monotonic() - began < 30  # of what never comes
            counts = case.source.ledger.counts()
            assert counts.open == 0
            expected = {"collect": {Outcome.CANCELLED: 4}, "train": {}, "sync": {Outcome.TRAINED: 4}}[phase]
            assert counts.closed == expected
            assert counts.ready == (4 if phase == "train" else 0)  # sampled, and nobody has taken them
            assert case.recorder.end.reason == "interrupted"
            assert case.recorder.events_of(PhaseStarted)[-1].phase == phase
            assert case.recorder.end.summary["ledger"]["open"] == 0
    assert threads_of_ours() == []


async def test_a_cancelled_run_leaves_nothing_queued_for_the_next_one() -> None:
    with hello_engine() as engine:
        engine.always("/generate", Stall())
        store = BridgeStore()
        with LoopCase(agent=HelloAgent(), url=engine.url, store=store, rollout_batch_size=8, max_concurrent=2) as case:
            running = asyncio.ensure_future(case.loop.run_async())
            while engine.calls["/generate"] < 2:  # noqa: ASYNC110 - the engine has a loop of its own
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert case.source.ledger.counts().closed == {Outcome.CANCELLED: 16}
        assert await store.dequeue_many_rollouts(limit=100) == []
        engine.always("/generate", None)
        with LoopCase(agent=HelloAgent(), url=engine.url, store=store) as case:
            await asyncio.wait_for(case.loop.run_async(), 20)
            assert case.source.ledger.counts().closed == {Outcome.TRAINED: 4}


def test_validation_without_val_tasks_is_refused(engine: ScriptedEngine) -> None:
    with pytest.raises(ConfigError, match=r"^val_tasks is None"):
        LoopCase(agent=HelloAgent(), url=engine.url, eval_interval=2)
