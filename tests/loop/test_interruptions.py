"""Runs that are interrupted, whose rollouts all fail for a while, or that resume from an earlier state."""

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
from tests.harness.loop import TASKS, HelloAgent, LoopCase
from tests.harness.scripted_engine import ScriptedEngine
from tests.loop.failed_run import failed_run


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
def test_a_judge_that_is_away_for_a_while_ends_nothing(max_staleness: int, engine: ScriptedEngine, quick_pauses: None):
    settings: dict[str, Any] = {"num_iterations": 5, "max_staleness": max_staleness, "failure_patience_s": 60}
    agent = HelloAgent(judge=Judge(away=range(4, 12)))
    with LoopCase(agent=agent, url=engine.url, tasks=numbered(), **settings) as case:
        assert case.loop.run().iterations == 5
        case.check_ledger()
    assert [len(batch) for batch in case.trainer.batches if batch] == [2] * 5
    warnings = [event.text for event in case.recorder.events_of(Warning)]
    assert warnings
    assert all("the judge is away" in text and "trying again in" in text for text in warnings)
    collected = [group.group_id for event in case.recorder.events_of(GroupsCollected) for group in event.groups]
    assert len(collected) == len(set(collected)) >= 10 + 2 * len(warnings)


@pytest.mark.parametrize(
    ("away", "patience_s", "error", "batches"),
    [
        (range(2, 10_000), 0.3, r"no rollout succeeds any more \(\d+ tries.*the judge is away", 1),
        (range(10_000), 600, "iteration 1: all 4 rollouts failed", 0),  # no pause where nothing has worked yet
    ],
)
def test_a_judge_that_stays_away_ends_the_run(away, patience_s, error, batches, engine, quick_pauses):
    judge = Judge(away=away)
    case, _ = failed_run(
        engine, error, agent=HelloAgent(judge=judge), tasks=numbered(), num_iterations=9, failure_patience_s=patience_s
    )
    assert len(case.trainer.batches) == batches
    assert batches or judge.calls == 4


@pytest.mark.parametrize(("cancelled", "max_staleness"), [(True, 2), (False, 2), (True, 0)])
async def test_a_run_that_ends_early_is_saved_where_it_stands(cancelled, max_staleness, engine):
    """It ends while the third batch is collected: the checkpoint is the second iteration's."""
    saved: list[LoopState] = []
    reached, dead = asyncio.Event(), threading.Event()
    loop, calls = asyncio.get_running_loop(), count(1)

    class Agent(HelloAgent):
        async def compute_reward(self, task: dict[str, Any], response: str) -> float:  # type: ignore[override]
            if next(calls) > 8:
                loop.call_soon_threadsafe(reached.set)
                await asyncio.sleep(30)
            return 1.0

    def check_alive() -> None:
        if dead.is_set():
            raise LoopError("the engine has died")

    with LoopCase(
        agent=Agent(), url=engine.url, num_iterations=9, max_staleness=max_staleness, save=saved.append
    ) as case:
        case.loop._check_alive = check_alive
        running = asyncio.ensure_future(case.loop.run_async())
        await asyncio.wait_for(reached.wait(), 20)
        while len(case.recorder.metrics) < 2:  # noqa: ASYNC110 - with staleness rollouts run ahead
            await asyncio.sleep(0.01)
        if cancelled:
            running.cancel()
        else:
            dead.set()
        with pytest.raises(asyncio.CancelledError if cancelled else LoopError):
            await running
    assert [state.iteration for state in saved] == [0, 2]
    assert saved[-1].reward_means == (1.0, 1.0)
    assert bool(saved[-1].admitted)


async def test_no_group_is_begun_beside_the_last_checkpoint(engine: ScriptedEngine) -> None:
    """A dropped group's replacement is drawn while the run is cancelled: a group that the checkpoint's loop does not
    know, and its data source does, would never be trained on."""
    drawing, may_draw, admitted = threading.Event(), threading.Event(), list[tuple[set[str], set[str]]]()
    make_numbered = numbered()

    def make_task(rng: random.Random) -> dict[str, Any]:
        task = make_numbered(rng)
        if task["number"] == 4:
            drawing.set()
            assert may_draw.wait(20)
        return task

    def save(state: LoopState) -> None:
        if state.iteration == 1:
            may_draw.set()
            for _ in range(2_000):
                if case.loop._schedule._enqueueing is None or case.loop._schedule._enqueueing.done():
                    break
                time.sleep(0.01)
            admitted.append(({*state.admitted}, {*case.loop._schedule.admitted()}))

    agent = HelloAgent(judge=Judge(away=range(2, 3)))
    settings: dict[str, Any] = {"tasks": make_task, "num_iterations": 9, "max_replaced_groups": 2, "save": save}
    with LoopCase(agent=agent, url=engine.url, **settings) as case:
        running = asyncio.ensure_future(case.loop.run_async())
        assert await asyncio.to_thread(drawing.wait, 20)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert admitted == [({"3"}, {"3"})]


async def test_an_interrupted_training_step_is_finished_and_saved(engine: ScriptedEngine) -> None:
    saved: list[LoopState] = []
    begun, may_end = threading.Event(), threading.Event()

    def train(iteration: int) -> dict[str, float]:
        if iteration == 2:
            begun.set()
            assert may_end.wait(20)
        return case.trainer(iteration)

    with LoopCase(agent=HelloAgent(), url=engine.url, num_iterations=9, train=train, save=saved.append) as case:
        running = asyncio.ensure_future(case.loop.run_async())
        await asyncio.to_thread(begun.wait, 20)
        running.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert [(state.iteration, state.version) for state in saved] == [(0, "0"), (2, "2")]
    assert len(case.recorder.metrics) == 2


def test_a_trainer_that_fails_in_a_step_is_not_saved(engine: ScriptedEngine) -> None:
    saved: list[LoopState] = []

    def train(iteration: int) -> None:
        if iteration == 2:
            raise ValueError("half a step")

    failed_run(engine, "half a step", num_iterations=9, train=train, save=saved.append)
    assert [state.iteration for state in saved] == [0]


def test_a_lower_limit_is_refused_while_older_groups_were_in_flight() -> None:
    start = LoopState(iteration=4, version="4", admitted={"6": 2, "7": 2, "8": 4, "9": 4, "10": 4, "11": 4})
    settings: dict[str, Any] = {"agent": HelloAgent(), "url": "http://127.0.0.1:9", "num_iterations": 9, "start": start}
    LoopCase(max_staleness=4, **settings).source.stop()
    for limit in (0, 1):
        with pytest.raises(ConfigError, match=rf"max_staleness {limit}: .* holds \d groups .*under a higher limit"):
            LoopCase(max_staleness=limit, **settings)


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


def test_an_interrupted_group_keeps_its_age_unless_it_had_no_place(engine: ScriptedEngine) -> None:
    """Tasks without an end are drawn first, in their order; of the interrupted ones, 0 comes at once and 8 after two
    steps. Each step waits until all places are taken."""
    saved, ages = list[LoopState](), list[int | None]()
    enqueued, steps = Enqueued(), count()

    def train(iteration: int) -> Any:
        enqueued.wait(min(12, 6 + 2 * next(steps)))
        ages.append(case.loop._schedule.admitted().get("0"))
        return case.trainer(iteration)

    start = LoopState(iteration=4, version="4", admitted={"0": 3, "8": 4})
    settings: dict[str, Any] = {"rollout_batch_size": 2, "max_staleness": 2, "save_interval": 1, "num_iterations": 10}
    settings |= {"start": start, "save": saved.append, "store": enqueued, "train": train}
    with LoopCase(agent=HelloAgent(), url=engine.url, **settings) as case:
        case.loop.run()
    assert {state.admitted["8"] for state in saved if "8" in state.admitted} == {6}
    assert {*ages} - {None} == {3}


def test_training_tasks_resume_in_place_when_validation_is_turned_off(engine: ScriptedEngine) -> None:
    tasks: list[list[str]] = []
    for start in (None, LoopState(iteration=0, version="0", validations=3)):
        names: list[str] = []

        def judge(task: dict[str, Any], response: str, names: list[str] = names) -> float:
            names.append(task["name"])
            return 1.0

        settings: dict[str, Any] = {"eval_interval": 0, "eval_rollouts": 1, "start": start}
        with LoopCase(agent=HelloAgent(judge=judge), url=engine.url, **settings) as case:
            case.loop.run()
        tasks.append(sorted(names))
    assert tasks[0] == tasks[1]


def test_tasks_are_made_off_the_loop(engine: ScriptedEngine) -> None:
    threads: set[int] = set()

    def make_task(rng: Any) -> dict[str, Any]:
        threads.add(threading.get_ident())
        time.sleep(0.01)
        return TASKS[0]

    with LoopCase(agent=HelloAgent(), url=engine.url, tasks=make_task) as case:
        case.loop.run()
    assert threads
    assert threading.get_ident() not in threads


def test_validation_in_flight_at_the_last_one_is_reported(engine: ScriptedEngine) -> None:
    """The validation after iteration 3 is blocked until the last one is due."""
    from agl_slime.support.agl import LLM

    blocked, release, validated = threading.Event(), threading.Event(), count(1)

    def push(version: str) -> None:
        if next(validated) == 2:
            blocked.set()
            assert release.wait(20)

    def train(iteration: int) -> None:
        if iteration == 4:
            assert blocked.wait(20)
            threading.Timer(0.3, release.set).start()
        case.trainer(iteration)

    llm = LLM(endpoint=engine.url, model="scripted", sampling_parameters={"max_new_tokens": 8, "temperature": 1.0})
    settings: dict[str, Any] = {"num_iterations": 4, "max_staleness": 1, "eval_interval": 2, "eval_rollouts": 1}
    with LoopCase(
        agent=HelloAgent(judge=lambda task, response: float(task["name"] == "Ada")),
        url=engine.url,
        val_tasks=TASKS[:1],
        val_llm=llm,
        val_sync_fn=push,
        train=train,
        **settings,
    ) as case:
        case.loop.run()
    last = case.recorder.metrics[-1]
    assert last["val/reward_mean"] == last["val/earlier_reward_mean"] == 1.0
