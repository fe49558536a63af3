"""Asynchronous training with bounded staleness: a real store, runner, data source and HTTP; model and trainer are
played."""

import asyncio
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from agl_slime.data.results import Outcome
from agl_slime.errors import ConfigError, LoopError
from agl_slime.events import IterationFinished
from agl_slime.support.agl import LLM
from agl_slime.types import Sample
from tests.harness.loop import HelloAgent, LoopCase, hello_engine
from tests.harness.scripted_engine import ScriptedEngine

TASKS = [{"prompt": f"say hello to {n}", "n": n} for n in range(200)]


class Overlapped(LoopCase):
    """A case whose trainer and weight sync set the version that the engine reports; ``behind`` has the staleness of
    each trained span. ``on_step`` is called in a thread before each step of training."""

    def __init__(
        self, engine: Any, *, judge: Any = None, on_step: Callable[[int], None] | None = None, **settings: Any
    ) -> None:
        self.engine, self.on_step, self.version = engine, on_step, 0
        self.behind: list[int] = []
        self.batches: list[list[list[Sample]]] = []
        engine.weight_version = "0"
        defaults = {"tasks": TASKS, "max_staleness": 1, "num_iterations": 6, "train": self.train, "sync": self.sync}
        super().__init__(agent=HelloAgent(judge=judge), url=engine.url, **{**defaults, **settings})

    def train(self, iteration: int) -> dict[str, float]:
        if self.on_step is not None:
            self.on_step(iteration)
        batch = self.source.get_samples(self.settings.rollout_batch_size)
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


@pytest.mark.parametrize("max_staleness", [1, 3])
async def test_every_group_is_trained_on_once_and_none_is_too_old(max_staleness: int, engine: ScriptedEngine) -> None:
    async def judge(task: dict[str, Any], response: str) -> float:
        await asyncio.sleep(0.2 if task["n"] % 5 == 0 else 0.001)  # stragglers
        return 1.0

    settings = {"max_staleness": max_staleness, "num_iterations": 12, "rollout_batch_size": 3}
    with Overlapped(engine, judge=judge, **settings) as case:
        await case.loop.run_async()
        case.check_ledger()
    assert case.source.ledger.counts().closed == {Outcome.TRAINED: 12 * 3 * 2}
    assert case.trained == {str(n): 1 for n in range(36)}
    assert 0 < max(case.behind) <= max_staleness  # rollouts go on during training
    assert all(0 <= row["perf/cpu_busy"] <= 1 for row in case.recorder.metrics)
    staleness = [row["rollout/staleness_max"] for row in case.recorder.metrics]
    assert staleness[-1] <= max_staleness
    assert max(staleness) == max(case.behind)


async def test_admission_stays_within_the_bound(engine: ScriptedEngine) -> None:
    admitted: list[int] = []
    with Overlapped(
        engine,
        on_step=lambda _: admitted.append(case.source.ledger.counts().opened // 2),
        num_iterations=5,
        max_staleness=2,
    ) as case:
        await case.loop.run_async()
    assert all(n <= (step + 2 + 1) * 2 for step, n in enumerate(admitted))
    assert admitted[-1] == 10  # nothing is enqueued that would not be trained on


async def test_synchronous_training_enqueues_nothing_during_a_step(engine: ScriptedEngine) -> None:
    counts: list[tuple[int, int]] = []

    def count_rollouts(iteration: int) -> None:
        now = case.source.ledger.counts()
        counts.append((now.opened, now.open))

    with Overlapped(engine, on_step=count_rollouts, max_staleness=0) as case:
        await case.loop.run_async()
    assert counts == [(4 * iteration, 0) for iteration in range(1, 7)]
    assert set(case.behind) == {0}
    batches = [sorted(int(group[0].metadata["instance_id"]) for group in batch) for batch in case.batches]
    assert batches == [[2 * n, 2 * n + 1] for n in range(6)]
    assert not any("perf/roll_s" in row or "waited" in str(row.keys()) for row in case.recorder.metrics)


@pytest.mark.parametrize("max_replaced", [None, 0])
async def test_dropped_group_is_replaced_unless_replacement_is_off(max_replaced: int | None, engine: ScriptedEngine):
    def judge(task: dict[str, Any], response: str) -> float:
        if task["prompt"].endswith("3"):
            raise ValueError("no reward")
        return 1.0

    with Overlapped(engine, judge=judge, max_replaced_groups=max_replaced) as case:
        await case.loop.run_async()
        case.check_ledger()
    dropped = sum(row["rollout/groups_dropped"] for row in case.recorder.metrics)
    assert dropped > 0
    assert case.source.ledger.counts().closed[Outcome.TRAINED] // 2 == (12 if max_replaced is None else 12 - dropped)
    assert set(case.trained.values()) == {1}


@pytest.mark.parametrize("max_staleness", [0, 2])
async def test_a_pilot_of_equal_rewards_costs_its_rollouts_alone(max_staleness: int, engine: ScriptedEngine) -> None:
    judged = Counter[int]()

    def judge(task: dict[str, Any], response: str) -> float:
        judged[task["n"]] += 1
        return 1.0 if task["n"] % 2 else float(judged[task["n"]] % 2)

    settings = {"n_samples_per_prompt": 4, "group_pilot": 2, "max_replaced_groups": 20, "judge": judge}
    with Overlapped(engine, max_staleness=max_staleness, **settings) as case:
        await case.loop.run_async()
        case.check_ledger()
    assert max(case.behind) <= max_staleness
    assert {len(group) for batch in case.batches for group in batch} == {4}
    assert {n % 2: judged[n] for n in judged} == {0: 4, 1: 2}
    rows = case.recorder.metrics
    dropped = sum(row["rollout/dropped/pilot_equal"] for row in rows if "rollout/dropped/pilot_equal" in row)
    counts = case.source.ledger.counts()
    assert counts.closed[Outcome.TRAINED] == 6 * 2 * 4
    assert counts.reasons[Outcome.FILTERED, "pilot_equal"] >= 2 * dropped > 0
    assert all(0 < row["rollout/no_gradient"] < 1 for row in rows if row.get("rollout/dropped/pilot_equal"))


async def test_pilots_of_equal_rewards_do_not_end_the_run(engine: ScriptedEngine) -> None:
    settings = {"n_samples_per_prompt": 4, "group_pilot": 2, "max_replaced_groups": 1, "max_staleness": 0}
    with Overlapped(engine, judge=lambda task, response: 1.0, max_empty_iterations=2, **settings) as case:
        await case.loop.run_async()
        case.check_ledger()
    assert (len(case.recorder.metrics), case.batches) == (6, [])


async def test_a_training_function_has_to_take_its_batch(engine: ScriptedEngine) -> None:
    with (
        Overlapped(engine, train=lambda iteration: {}) as case,
        pytest.raises(LoopError, match="left 2 groups of its batch"),
    ):
        await case.loop.run_async()


async def test_task_source_that_fails_ahead_of_training_ends_the_run(engine: ScriptedEngine) -> None:
    drawn = count()

    def make_task(rng: Any) -> dict[str, Any]:
        if next(drawn) >= 6:
            raise RuntimeError("no more tasks")
        return {"prompt": "say hello"}

    with Overlapped(engine, tasks=make_task) as case, pytest.raises(LoopError, match="no more tasks"):
        await asyncio.wait_for(case.loop.run_async(), 20)
    assert case.source.ledger.counts().open == 0


async def test_validations_run_beside_training_and_report_their_lag(engine: ScriptedEngine) -> None:
    released, loop = asyncio.Event(), asyncio.get_running_loop()

    async def judge(task: dict[str, Any], response: str) -> float:
        if task.get("val"):
            await asyncio.wait_for(released.wait(), 10)
        return 1.0

    def on_event(event: Any) -> None:
        if isinstance(event, IterationFinished) and event.iteration == 3:
            loop.call_soon_threadsafe(released.set)

    val_tasks = [{"prompt": "v", "val": True}]
    settings = {"eval_interval": 100, "eval_rollouts": 2, "val_tasks": val_tasks, "on_event": on_event}
    with Overlapped(engine, judge=judge, tasks=lambda rng: {"prompt": "say hello"}, **settings) as case:
        await case.loop.run_async()
        case.check_ledger()
    [first] = [row for row in case.recorder.metrics if "val/start_reward_mean" in row]
    assert first["iteration"] > 3  # it began before the first iteration, which did not wait for it
    assert first["val/lag"] >= 3
    last = case.recorder.metrics[-1]
    assert (last["val/reward_mean"], last["val/lag"]) == (1.0, 0)


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_each_validation_has_the_same_tasks_and_its_own_sampling(engine: ScriptedEngine, max_staleness: int):
    """A policy that never changes, and rewards that the task fixes: all validations are equal."""
    validated: list[str] = []

    def judge(task: dict[str, Any], response: str) -> float:
        if "val" in task:
            validated.append(task["val"])
        return len(task.get("val", "")) / 10

    names = ["a", "bbb", "cccccc", "ddddddddd", "ee"]
    own = {
        "eval_interval": 2,
        "eval_rollouts": 3,
        "val_tasks": [{"prompt": "v", "val": name} for name in names],
        "val_llm": LLM(endpoint=engine.url, model="scripted", sampling_parameters={"max_new_tokens": 7, "top_p": 0.5}),
    }
    with Overlapped(engine, judge=judge, max_staleness=max_staleness, **own) as case:
        await case.loop.run_async()
    rewards = [value for row in case.recorder.metrics for name, value in row.items() if name.endswith("reward_mean")]
    assert len(validated) >= 6
    assert set(Counter(validated).values()) == {len(validated) // 3}
    expected = pytest.approx(sum(map(len, {*validated})) / 30)
    assert [value for value in rewards if value] == [expected] * (len(validated) // 3)  # rewards of training are 0
    assert case.recorder.metrics[-1]["val/difference"] == 0.0
    sampled = [received.payload["sampling_params"] for received in engine.received if received.path == "/generate"]
    counts = Counter(each.get("top_p") == 0.5 for each in sampled)  # an update of the weights repeats a request
    assert counts[True] >= len(validated)
    assert counts[False] >= len(case.source.ledger.finished_instances())


async def test_validation_engine_keeps_the_weights_that_validation_started_with() -> None:
    pushed: list[str] = []
    with hello_engine() as engine, hello_engine() as second:
        llm = LLM(endpoint=second.url, model="scripted", sampling_parameters={"max_new_tokens": 8})
        settings = {"eval_interval": 2, "eval_rollouts": 3, "val_llm": llm, "val_sync_fn": pushed.append}
        with Overlapped(engine, tasks=lambda rng: {"prompt": "say hello"}, **settings) as case:
            await case.loop.run_async()
            case.check_ledger()
        counts = case.source.ledger.counts().closed
        assert second.calls["/generate"] == counts[Outcome.VALIDATED] == 3 * len(pushed)
        assert engine.calls["/generate"] == counts[Outcome.TRAINED]
    assert (pushed[0], pushed[-1]) == ("0", "6")
    assert {row["val/lag"] for row in case.recorder.metrics if "val/lag" in row} == {0}


def test_invalid_overlap_settings_are_refused(engine: ScriptedEngine) -> None:
    with pytest.raises(ConfigError, match="max_staleness must be 0"):
        Overlapped(engine, max_staleness=-1)
    for own in ({"val_llm": LLM(endpoint=engine.url, model="scripted")}, {"eval_interval": 1}):
        with pytest.raises(ConfigError, match="val_sync_fn is for asynchronous validations on an engine of their own"):
            Overlapped(engine, val_sync_fn=print, **own)
