"""Generation and training side by side: a real store, runner, data source and HTTP; the model and the trainer are
played."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import pytest

from agl_slime.data.results import Outcome
from agl_slime.errors import ConfigError, LoopError
from agl_slime.events import IterationFinished
from agl_slime.support.agl import LLM
from agl_slime.types import Sample
from tests.harness.loop import HelloAgent, LoopCase, hello_engine

TASKS = [{"prompt": f"say hello to {n}", "n": n} for n in range(200)]


class Versioned:
    """A trainer and a weight sync whose versions the engine reports; keeps how far each sampled token was behind."""

    def __init__(self, engine: Any) -> None:
        self.case: LoopCase | None = None
        self.engine = engine
        self.version = 0
        self.behind: list[int] = []
        self.batches: list[list[list[Sample]]] = []
        engine.weight_version = "0"

    def train(self, iteration: int) -> dict[str, float]:
        assert self.case is not None
        batch = self.case.source.get_samples(self.case.settings.rollout_batch_size)
        self.batches.append(batch)
        spans = [span for group in batch for sample in group for span in sample.metadata["weight_spans"]]
        self.behind += [self.version - int(version) for version, _, _ in spans]
        return {"train/loss": 0.5}

    def sync(self, iteration: int) -> str:
        self.version = iteration
        self.engine.weight_version = str(iteration)
        return str(iteration)

    @property
    def trained(self) -> Counter[str]:
        return Counter(group[0].metadata["instance_id"] for batch in self.batches for group in batch)


def overlapped(
    engine: Any, *, agent: Any = None, max_staleness: int = 1, **settings: Any
) -> tuple[LoopCase, Versioned]:
    played = Versioned(engine)
    case = LoopCase(
        agent=agent or HelloAgent(),
        url=engine.url,
        train=played.train,
        sync=played.sync,
        **{"tasks": TASKS, "max_staleness": max_staleness, "num_iterations": 6, **settings},
    )
    played.case = case
    return case, played


@pytest.mark.parametrize("max_staleness", [1, 3])
async def test_every_group_is_trained_on_once_and_none_is_too_old(max_staleness: int) -> None:
    async def judge(task: dict[str, Any], response: str) -> float:
        await asyncio.sleep(0.2 if task["n"] % 5 == 0 else 0.001)  # stragglers
        return 1.0

    with hello_engine() as engine:
        case, played = overlapped(
            engine, agent=HelloAgent(judge=judge), max_staleness=max_staleness, num_iterations=12, rollout_batch_size=3
        )
        with case:
            await case.loop.run_async()
            case.check_ledger()
            assert case.source.ledger.counts().closed == {Outcome.TRAINED: 12 * 3 * 2}
            assert played.trained == {str(n): 1 for n in range(36)}
            assert 0 < max(played.behind) <= max_staleness
            row = case.recorder.metrics[-1]
            assert row["rollout/staleness_max"] <= max_staleness
            assert max(row["rollout/staleness_max"] for row in case.recorder.metrics) == max(played.behind)


async def test_rollouts_continue_during_training() -> None:
    """Training waits for a rollout that was enqueued after the batch: without an overlap this would never end."""
    began = threading.Event()

    async def judge(task: dict[str, Any], response: str) -> float:
        if case.source.ledger.counts().opened > 4:
            began.set()
        return 1.0

    with hello_engine() as engine:
        case, played = overlapped(engine, agent=HelloAgent(judge=judge), num_iterations=2)
        inner = played.train

        def train(iteration: int) -> dict[str, float]:
            assert began.wait(10)
            return inner(iteration)

        case.loop._train_fn = lambda iteration: asyncio.to_thread(train, iteration)
        with case:
            await case.loop.run_async()
            case.check_ledger()
            assert all(0 <= row["perf/cpu_busy"] <= 1 for row in case.recorder.metrics)


async def test_no_more_than_the_bound_is_ever_admitted() -> None:
    with hello_engine() as engine:
        case, played = overlapped(engine, num_iterations=5, max_staleness=2, rollout_batch_size=2)
        most: list[tuple[int, int]] = []
        inner = played.train

        def train(iteration: int) -> dict[str, float]:
            most.append((iteration, case.source.ledger.counts().opened // 2))
            return inner(iteration)

        case.loop._train_fn = lambda iteration: asyncio.to_thread(train, iteration)
        with case:
            await case.loop.run_async()
        assert all(admitted <= (iteration - 1 + 2 + 1) * 2 for iteration, admitted in most)
        assert most[-1][1] == 10  # nothing is enqueued that nobody would train on


async def test_in_turn_nothing_is_enqueued_while_a_batch_is_trained_on() -> None:
    with hello_engine() as engine:
        case, played = overlapped(engine, max_staleness=0)
        seen: list[tuple[int, int]] = []
        inner = played.train

        def train(iteration: int) -> dict[str, float]:
            counts = case.source.ledger.counts()
            seen.append((counts.opened, counts.open))
            return inner(iteration)

        case.loop._train_fn = lambda iteration: asyncio.to_thread(train, iteration)
        with case:
            await case.loop.run_async()
        assert seen == [(4 * iteration, 0) for iteration in range(1, 7)]
        assert set(played.behind) == {0}
        batches = [sorted(int(group[0].metadata["instance_id"]) for group in batch) for batch in played.batches]
        assert batches == [[2 * n, 2 * n + 1] for n in range(6)]
        assert not any("perf/roll_s" in row or "waited" in str(row.keys()) for row in case.recorder.metrics)


async def test_dropped_group_is_replaced_or_counts_when_replacement_is_off() -> None:
    def judge(task: dict[str, Any], response: str) -> float:
        if task["prompt"].endswith("3"):
            raise ValueError("no reward")
        return 1.0

    with hello_engine() as engine:
        for most, expected in ((None, 12), (0, None)):
            case, played = overlapped(engine, agent=HelloAgent(judge=judge), max_replaced_groups=most)
            with case:
                await case.loop.run_async()
                case.check_ledger()
                trained = case.source.ledger.counts().closed[Outcome.TRAINED] // 2
                dropped = sum(row["rollout/groups_dropped"] for row in case.recorder.metrics)
                assert trained == (expected or 12 - dropped)
                assert dropped > 0
                assert set(played.trained.values()) == {1}


async def test_an_agent_that_always_fails_ends_the_run_at_once() -> None:
    def judge(task: dict[str, Any], response: str) -> float:
        raise ValueError("never")

    with hello_engine() as engine:
        case, _ = overlapped(engine, agent=HelloAgent(judge=judge), num_iterations=50)
        with case, pytest.raises(LoopError, match="iteration 1: all 4 rollouts failed"):
            await case.loop.run_async()
        assert case.source.ledger.counts().opened <= 12


async def test_a_training_function_has_to_take_its_batch() -> None:
    with hello_engine() as engine:
        case, played = overlapped(engine)
        played.train = lambda iteration: {}  # type: ignore[method-assign]
        case.loop._train_fn = lambda iteration: asyncio.to_thread(dict)
        with case, pytest.raises(LoopError, match="left 2 groups of its batch"):
            await case.loop.run_async()


async def test_task_source_that_fails_ahead_of_training_ends_the_run() -> None:
    drawn = 0

    def make_task(rng: Any) -> dict[str, Any]:
        nonlocal drawn
        drawn += 1
        if drawn > 6:
            raise RuntimeError("no more tasks")
        return {"prompt": "say hello"}

    with hello_engine() as engine:
        case, _ = overlapped(engine, tasks=make_task)
        with case, pytest.raises(LoopError, match="no more tasks"):
            await asyncio.wait_for(case.loop.run_async(), 20)
        counts = case.source.ledger.counts()
        assert counts.open == 0


async def test_validations_run_beside_training_and_say_how_far_it_went_meanwhile() -> None:
    released = asyncio.Event()

    async def judge(task: dict[str, Any], response: str) -> float:
        if task.get("val"):
            await asyncio.wait_for(released.wait(), 10)
        return 1.0

    def on_event(event: Any) -> None:
        if isinstance(event, IterationFinished) and event.iteration == 3:
            loop.call_soon_threadsafe(released.set)

    loop = asyncio.get_running_loop()
    with hello_engine() as engine:
        case, _ = overlapped(
            engine,
            agent=HelloAgent(judge=judge),
            tasks=lambda rng: {"prompt": "say hello"},
            eval_interval=100,
            eval_rollouts=2,
            val_tasks=[{"prompt": "v", "val": True}],
            on_event=on_event,
        )
        with case:
            await case.loop.run_async()
            case.check_ledger()
        [first] = [row for row in case.recorder.metrics if "val/start_reward_mean" in row]
        assert first["iteration"] > 3  # it began before the first iteration, which did not wait for it
        assert first["val/lag"] >= 3
        assert case.recorder.metrics[-1]["val/reward_mean"] == 1.0
        assert case.recorder.metrics[-1]["val/lag"] == 0


async def test_validation_engine_keeps_the_weights_that_validation_started_with() -> None:
    pushed: list[str] = []
    with hello_engine() as engine, hello_engine() as second:
        llm = LLM(endpoint=second.url, model="scripted", sampling_parameters={"max_new_tokens": 8})
        case, _ = overlapped(
            engine,
            tasks=lambda rng: {"prompt": "say hello"},
            eval_interval=2,
            eval_rollouts=3,
            val_engine=(llm, pushed.append),
        )
        with case:
            await case.loop.run_async()
            case.check_ledger()
        counts = case.source.ledger.counts().closed
        assert second.calls["/generate"] == counts[Outcome.VALIDATED] == 3 * len(pushed)
        assert engine.calls["/generate"] == counts[Outcome.TRAINED]
        assert pushed[0] == "0"
        assert pushed[-1] == "6"
        assert {row["val/lag"] for row in case.recorder.metrics if "val/lag" in row} == {0}


def test_invalid_overlap_settings_are_refused() -> None:
    with hello_engine() as engine:
        with pytest.raises(ConfigError, match="max_staleness must be 0"):
            overlapped(engine, max_staleness=-1)
        with pytest.raises(ConfigError, match="val_engine needs asynchronous validations"):
            overlapped(engine, val_engine=(LLM(endpoint=engine.url, model="scripted"), print))
