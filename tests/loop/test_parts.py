"""A run of which a part breaks (trainer, store, threads, tasks, engine) or that is cancelled."""

import asyncio
import threading
import time
from typing import Any

import pytest

from agl_slime.data import enqueueing
from agl_slime.data.results import Outcome
from agl_slime.data.source import DataSourceSettings
from agl_slime.errors import ConfigError, DataSourceError, LoopError, TrainerError
from agl_slime.events import PhaseStarted
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import InMemoryLightningStore, LightningStore
from tests.harness.engine_faults import Stall
from tests.harness.loop import HelloAgent, LoopCase, hello_engine, threads_of_ours
from tests.harness.scripted_engine import ScriptedEngine
from tests.loop.failed_run import failed_run


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run checks for dead threads twenty times a second."""
    monkeypatch.setattr(enqueueing, "_HEALTH_CHECK_INTERVAL_S", 0.05)


async def is_not_a_number(iteration: int) -> dict[str, float]:
    raise TrainerError("the loss is NaN")


def full_disk(iteration: int) -> str:
    raise OSError("disk full")


def no_difficulty(rng: Any) -> dict[str, Any]:
    raise KeyError("difficulty")


@pytest.mark.parametrize(
    ("function", "error", "sentence", "iterations"),
    [
        (
            {"train": lambda iteration: {"train/loss": 1 / (2 - iteration)}},
            LoopError,
            r"^iteration 2: training failed with ZeroDivisionError: .*\(test_parts\.py, line \d+\)$",
            1,
        ),
        ({"train": is_not_a_number}, TrainerError, r"^the loss is NaN$", 0),
        ({"sync": full_disk}, LoopError, r"^iteration 1: weight sync failed with OSError: disk full", 0),
        (
            {"tasks": no_difficulty},
            LoopError,
            r"^iteration 1: failed with KeyError: 'difficulty' \(test_parts\.py, line",
            0,
        ),
    ],
    ids=["train", "package error", "sync", "tasks"],
)
def test_a_function_that_raises_ends_the_run_with_its_place_and_cause(function, error, sentence, iterations, engine):
    case, _ = failed_run(engine, sentence, error=error, num_iterations=4, **function)
    assert len(case.recorder.metrics) == iterations


class NoQueue(BridgeStore):
    """Its queue breaks once it is filled."""

    filled = False

    async def enqueue_many_rollouts(self, rollouts: Any) -> Any:
        self.filled = True
        return await super().enqueue_many_rollouts(rollouts)

    async def dequeue_many_rollouts(self, **_: Any) -> Any:
        if self.filled:
            raise ConnectionError("the queue is gone")
        return []


class NoSpans(BridgeStore):
    async def query_spans(self, *args: Any, **kwargs: Any) -> Any:
        raise OSError("the spans are gone")


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize(
    ("store", "error", "sentence"),
    [
        (NoQueue, LoopError, "the runner ended: the queue is gone"),
        (NoSpans, DataSourceError, "the data source's thread ended: the spans are gone"),
    ],
)
def test_a_runner_or_data_source_that_dies_ends_the_run(store: Any, error: Any, sentence: str, engine: ScriptedEngine):
    began = time.monotonic()
    case, _ = failed_run(engine, sentence, error=error, store=store())
    assert time.monotonic() - began < 15
    case.check_ledger()
    if store is NoQueue:
        assert case.source.ledger.counts().closed == {Outcome.CANCELLED: 4}


@pytest.mark.usefixtures("looks_often")
@pytest.mark.parametrize("phase", ["collect", "train", "sync"])
def test_an_engine_that_dies_in_any_phase_ends_the_run_immediately(phase: str, engine: ScriptedEngine) -> None:
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
            time.sleep(0.06)  # groups are finalized faster than the engine is checked
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
        assert time.monotonic() - began < 8  # 320 rollouts take longer
        assert case.source.ledger.counts().open == 0


@pytest.mark.parametrize("thread_safe", [True, False])
def test_a_plain_store_is_taken_in_its_wrapper_for_threads(thread_safe: bool, engine: ScriptedEngine) -> None:
    store = InMemoryLightningStore(thread_safe=thread_safe)
    settings = DataSourceSettings(get_timeout_s=20)
    sizes = {"num_iterations": 3, "rollout_batch_size": 16, "n_samples_per_prompt": 4}
    with LoopCase(agent=HelloAgent(), url=engine.url, store=store, source_settings=settings, **sizes) as case:
        case.loop.run()
        case.check_ledger()
    assert case.source.ledger.counts().closed == {Outcome.TRAINED: 192}
    assert (case.loop.store is store) is thread_safe
    assert case.loop.store is case.source._store  # one lock for all of its users
    assert threads_of_ours() == []
    with pytest.raises(ConfigError, match=r"LightningStore is not thread-safe; use agl_slime\.BridgeStore"):
        LoopCase(agent=HelloAgent(), url=engine.url, store=LightningStore())


@pytest.mark.parametrize("phase", ["collect", "train", "sync"])
async def test_a_cancelled_run_ends_immediately_and_each_rollout_has_an_outcome(phase: str) -> None:
    reached = asyncio.Event()

    async def wait_forever(iteration: int) -> None:
        reached.set()
        await asyncio.Event().wait()

    functions = {} if phase == "collect" else {phase: wait_forever}
    with hello_engine() as engine, LoopCase(agent=HelloAgent(), url=engine.url, **functions) as case:  # type: ignore[arg-type]
        if phase == "collect":
            engine.always("/generate", Stall())
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
        assert time.monotonic() - began < 30  # the wait would never end
        counts = case.source.ledger.counts()
        assert counts.open == 0
        assert counts.closed == {"collect": {Outcome.CANCELLED: 4}, "train": {}, "sync": {Outcome.TRAINED: 4}}[phase]
        assert counts.ready == (4 if phase == "train" else 0)  # sampled, and not taken
        assert case.recorder.end.reason == "interrupted"
        assert case.recorder.events_of(PhaseStarted)[-1].phase == phase
        assert case.recorder.end.summary["ledger"]["open"] == 0
    assert threads_of_ours() == []


async def test_a_cancelled_run_leaves_nothing_queued_for_the_next_run() -> None:
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
