"""Runs that are cut off, whose rollouts all fail for a while, or that go on from where another stood."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from agl_slime.errors import ConfigError, LoopError
from agl_slime.events import GroupsCollected, Warning
from agl_slime.loop import failures
from agl_slime.loop.settings import LoopState
from agl_slime.store.bridge import BridgeStore
from tests.harness.loop import TASKS, HelloAgent, LoopCase, hello_engine


@pytest.fixture
def quick_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(failures, "_LONGEST_PAUSE_S", 0.05)


class Judge:
    """Is away for the tasks of ``numbered`` whose numbers are in ``away``. A count of calls would depend on the order
    in which rollouts of two iterations end."""

    def __init__(self, *, away: range) -> None:
        self.calls, self._away = 0, away

    def __call__(self, task: dict[str, Any], response: str) -> float:
        self.calls += 1
        if task["number"] in self._away:
            raise ConnectionError("the judge is away")
        return 1.0


def numbered() -> Callable[[random.Random], dict[str, Any]]:
    """Makes tasks with the numbers 0, 1, 2, …"""
    numbers = count()
    return lambda _: {"prompt": "say hello", "number": next(numbers)}


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_judge_that_is_away_for_a_while_ends_nothing(max_staleness: int, quick_pauses: None) -> None:
    judge = Judge(away=range(4, 12))
    with (
        hello_engine() as engine,
        LoopCase(
            agent=HelloAgent(judge=judge),
            url=engine.url,
            tasks=numbered(),
            num_iterations=5,
            max_staleness=max_staleness,
            failure_patience_s=60,
        ) as case,
    ):
        assert case.loop.run().iterations == 5
        assert [len(batch) for batch in case.trainer.batches if batch] == [2] * 5
        warned = [event.text for event in case.recorder.events_of(Warning)]
        assert warned
        assert all("the judge is away" in text and "trying again in" in text for text in warned)
        told = [group.group_id for event in case.recorder.events_of(GroupsCollected) for group in event.groups]
        assert len(told) == len(set(told)) >= 10 + 2 * len(warned)
        case.check_ledger()


def test_a_judge_that_stays_away_ends_the_run_when_patience_is_used_up(quick_pauses: None) -> None:
    judge = Judge(away=range(2, 10_000))
    with (
        hello_engine() as engine,
        LoopCase(
            agent=HelloAgent(judge=judge), url=engine.url, tasks=numbered(), num_iterations=9, failure_patience_s=0.3
        ) as case,
    ):
        with pytest.raises(LoopError, match=r"no rollout succeeds any more \(\d+ tries.*the judge is away"):
            case.loop.run()
        assert len(case.trainer.batches) == 1


def test_agent_that_always_fails_ends_the_run_in_iteration_1() -> None:
    judge = Judge(away=range(10_000))
    with (
        hello_engine() as engine,
        LoopCase(
            agent=HelloAgent(judge=judge), url=engine.url, tasks=numbered(), num_iterations=9, failure_patience_s=600
        ) as case,
    ):
        with pytest.raises(LoopError, match="iteration 1: all 4 rollouts failed"):
            case.loop.run()
        assert judge.calls == 4


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_run_that_ends_early_is_saved_where_it_stands(cancelled: bool, max_staleness: int) -> None:
    """Cut off while the third batch is collected: the checkpoint is of the second."""
    saved: list[LoopState] = []
    reached = asyncio.Event()
    loop = asyncio.get_running_loop()
    calls = 0

    async def judge(task: dict[str, Any], response: str) -> float:
        nonlocal calls
        calls += 1
        if calls > 8:
            loop.call_soon_threadsafe(reached.set)
            await asyncio.sleep(30)
        return 1.0

    dead = False

    class Agent(HelloAgent):
        async def compute_reward(self, task: dict[str, Any], response: str) -> float:  # type: ignore[override]
            return await judge(task, response)

    with (
        hello_engine() as engine,
        LoopCase(
            agent=Agent(), url=engine.url, num_iterations=9, max_staleness=max_staleness, save=saved.append
        ) as case,
    ):

        def check() -> None:
            if dead:
                raise LoopError("the engine has died")

        case.loop._check_alive = check
        running = asyncio.ensure_future(case.loop.run_async())
        await asyncio.wait_for(reached.wait(), 20)
        while len(case.recorder.metrics) < 2:  # noqa: ASYNC110 - with staleness the judge is asked ahead
            await asyncio.sleep(0.01)
        if cancelled:
            running.cancel()
        else:
            dead = True
        with pytest.raises(asyncio.CancelledError if cancelled else LoopError):
            await running
    assert [state.iteration for state in saved] == [0, 2]
    assert saved[-1].reward_means == (1.0, 1.0)
    assert bool(saved[-1].admitted)


async def test_an_interrupted_training_step_is_finished_and_saved() -> None:
    saved: list[LoopState] = []
    begun, may_end = threading.Event(), threading.Event()

    def train(iteration: int) -> dict[str, float]:
        if iteration == 2:
            begun.set()
            assert may_end.wait(20)
        case.trainer(iteration)
        return {"train/loss": 0.5}

    with (
        hello_engine() as engine,
        LoopCase(agent=HelloAgent(), url=engine.url, num_iterations=9, train=train, save=saved.append) as case,
    ):
        running = asyncio.ensure_future(case.loop.run_async())
        await asyncio.to_thread(begun.wait, 20)
        running.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert [state.iteration for state in saved] == [0, 2]
    assert saved[-1].version == "2"
    assert len(case.recorder.metrics) == 2


def test_a_trainer_that_fails_in_a_step_is_not_saved() -> None:
    saved: list[LoopState] = []

    def train(iteration: int) -> None:
        case.trainer(iteration)
        if iteration == 2:
            raise ValueError("half a step")

    with (
        hello_engine() as engine,
        LoopCase(agent=HelloAgent(), url=engine.url, num_iterations=9, train=train, save=saved.append) as case,
        pytest.raises(LoopError, match="half a step"),
    ):
        case.loop.run()
    assert [state.iteration for state in saved] == [0]


@pytest.mark.parametrize("limit", [0, 1])
def test_a_lower_limit_is_refused_while_older_groups_were_in_flight(limit: int) -> None:
    start = LoopState(iteration=4, version="4", admitted={"6": 2, "7": 2, "8": 4, "9": 4, "10": 4, "11": 4})
    LoopCase(agent=HelloAgent(), url="http://127.0.0.1:9", num_iterations=9, max_staleness=4, start=start).source.stop()
    with pytest.raises(ConfigError, match=f"max_staleness {limit}: .*admitted under a higher limit"):
        LoopCase(agent=HelloAgent(), url="http://127.0.0.1:9", num_iterations=9, max_staleness=limit, start=start)


class Enqueued(BridgeStore):
    """A store that can be waited for: ``wait(n)`` returns when rollouts of ``n`` tasks were enqueued."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks: set[str] = set()
        self._changed = threading.Condition()

    async def enqueue_many_rollouts(self, rollouts: Any) -> Any:
        result = await super().enqueue_many_rollouts(rollouts)
        with self._changed:
            self._tasks.update(request.metadata["group_id"] for request in rollouts if request.metadata)
            self._changed.notify_all()
        return result

    def wait(self, n: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._tasks) >= n, 30)


def test_an_interrupted_group_without_a_place_gets_a_new_age() -> None:
    """Tasks without an end are drawn first, in their order; the interrupted one comes after two steps. Each step waits
    until all places are taken."""
    saved: list[LoopState] = []
    enqueued, steps = Enqueued(), count()

    def train(iteration: int) -> Any:
        enqueued.wait(min(12, 6 + 2 * next(steps)))
        return case.trainer(iteration)

    start = LoopState(iteration=4, version="4", admitted={"8": 4})
    settings: dict[str, Any] = {"rollout_batch_size": 2, "max_staleness": 2, "save_interval": 1, "num_iterations": 10}
    with (
        hello_engine() as engine,
        LoopCase(
            agent=HelloAgent(),
            url=engine.url,
            start=start,
            save=saved.append,
            store=enqueued,
            train=train,
            **settings,
        ) as case,
    ):
        case.loop.run()
    ages = {state.admitted["8"] for state in saved if "8" in state.admitted}
    assert ages == {6}


def test_training_tasks_resume_in_place_when_validation_is_turned_off() -> None:
    seen: list[list[str]] = []
    for start in (None, LoopState(iteration=0, version="0", validations=3)):
        asked: list[str] = []

        def judge(task: dict[str, Any], response: str, asked: list[str] = asked) -> float:
            asked.append(task["name"])
            return 1.0

        with (
            hello_engine() as engine,
            LoopCase(
                agent=HelloAgent(judge=judge), url=engine.url, eval_interval=0, eval_rollouts=1, start=start
            ) as case,
        ):
            case.loop.run()
        seen.append(sorted(asked))
    assert seen[0] == seen[1]


def test_tasks_are_made_off_the_loop() -> None:
    threads: set[int] = set()

    def make_task(rng: Any) -> dict[str, Any]:
        threads.add(threading.get_ident())
        time.sleep(0.01)
        return TASKS[0]

    with hello_engine() as engine, LoopCase(agent=HelloAgent(), url=engine.url, tasks=make_task) as case:
        case.loop.run()
    assert threads
    assert threading.get_ident() not in threads


def test_validation_in_flight_at_the_last_one_is_reported() -> None:
    """The one after iteration 3 is held until the last one is due."""
    held, release = threading.Event(), threading.Event()
    validated = 0

    def push(version: str) -> None:
        nonlocal validated
        validated += 1
        if validated == 2:
            held.set()
            assert release.wait(20)

    def train(iteration: int) -> None:
        if iteration == 4:
            assert held.wait(20)
            threading.Timer(0.3, release.set).start()
        case.trainer(iteration)

    with hello_engine() as engine:
        from agl_slime.support.agl import LLM

        sampling = {"max_new_tokens": 8, "temperature": 1.0}
        beside = LLM(endpoint=engine.url, model="scripted", sampling_parameters=sampling), push
        with LoopCase(
            agent=HelloAgent(judge=lambda task, response: float(task["name"] == "Ada")),
            url=engine.url,
            num_iterations=4,
            max_staleness=1,
            eval_interval=2,
            eval_rollouts=1,
            val_tasks=TASKS[:1],
            val_engine=beside,
            train=train,
        ) as case:
            case.loop.run()
    last = case.recorder.metrics[-1]
    assert last["val/reward_mean"] == last["val/earlier_reward_mean"] == 1.0
