"""Samplers of tasks: the floor, what is learned, states, and a sampler of a user's own."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_slime.data.results import GroupResult, MemberResult
from agl_slime.errors import ConfigError
from agl_slime.loop.sampling import OLDEST_EVERY, LearnableTasks
from agl_slime.loop.settings import LoopSettings
from agl_slime.loop.tasks import TaskCursor, as_task_source

TASKS: list[Any] = [{"n": n} for n in range(12)]


def cursor(tasks: Any = TASKS, *, seed: int = 0, sampling: Any = None, finished: Sequence[str] = ()) -> TaskCursor:
    source = as_task_source(tasks, seed=seed, learnable=0 if hasattr(tasks, "learned") else 4)
    return TaskCursor(source, sampling=sampling, finished=finished)


def group(drawn: Any, *rewards: float) -> GroupResult:
    names = {"group_id": drawn.group_id, "task": drawn.task, "instance_id": drawn.instance_id}
    members = [MemberResult(rollout_id=f"{drawn.group_id}/{i}", reward=r, **names) for i, r in enumerate(rewards)]
    members = members or [MemberResult(rollout_id="x", failure="timeout", **names)]
    return GroupResult(group_id=drawn.group_id, mode="train", size=4, members=tuple(members), ready=True)


def rewards_of(task: Any, rng: random.Random) -> list[float]:
    """Every fourth task has differing rewards, and every fifth fails."""
    if task["n"] % 5 == 4:
        return []
    return [float(rng.random() < 0.5) if task["n"] % 4 == 0 else float(task["n"] % 2) for _ in range(4)]


def play(drawing: TaskCursor, batches: int, rng: random.Random) -> list[int]:
    numbers = []
    for _ in range(batches):
        drawn = drawing.take(4)
        numbers += [each.task["n"] for each in drawn]
        done = [group(each, *rewards_of(each.task, rng)) for each in drawn]
        rng.shuffle(done)  # they end in any order
        drawing.learned(done)
    return numbers


@settings(max_examples=25)
@given(st.integers(0, 1000), st.integers(1, 30))
def test_each_task_comes_within_four_draws_per_task(seed: int, n: int) -> None:
    numbers = play(cursor([{"n": number} for number in range(n)], seed=seed), 4 * n, random.Random(seed))
    for start in range(len(numbers) - OLDEST_EVERY * n + 1):
        assert len({*numbers[start : start + OLDEST_EVERY * n]}) == n


def kinds(rng: random.Random) -> Any:
    n = rng.randrange(8)
    return {"n": n, "kind": f"of {n % 4}", "id": rng.random()}


@settings(max_examples=25)
@given(st.integers(0, 1000), st.integers(0, 6), st.booleans())
def test_a_restored_state_is_the_kept_state(seed: int, batches: int, listed: bool) -> None:
    """What was drawn and not learned is drawn first, with its number; a ready group is not drawn again."""
    tasks, rng = TASKS if listed else kinds, random.Random(seed)
    first = cursor(tasks, seed=seed)
    play(first, batches, rng)
    open_groups = first.take(5)
    first.learned([group(open_groups[3], 0.0, 1.0)])
    state = json.loads(json.dumps(first.sampling_state()))
    second = cursor(tasks, seed=seed, sampling=state, finished=[open_groups[1].instance_id or ""])
    again = second.take(3)
    left = [open_groups[place] for place in (0, 2, 4)]
    assert [(each.instance_id, each.task) for each in again] == [(each.instance_id, each.task) for each in left]
    assert second.sampling_state() == state
    assert play(first, 5, random.Random(1)) == play(second, 5, random.Random(1))
    assert first.sampling_state()["sampler"] == second.sampling_state()["sampler"]


def test_tasks_are_drawn_more_often_while_they_teach() -> None:
    tasks: Any = [{"n": n} for n in range(200)]  # every tenth teaches

    def share(drawing: TaskCursor, batches: int, teaches: int) -> float:
        numbers = list[int]()
        for _ in range(batches):
            drawn = drawing.take(16)
            numbers += [each.task["n"] for each in drawn]
            of = [[0.0, 1.0, 1.0, 0.0] if each.task["n"] % 10 == teaches else [1.0] * 4 for each in drawn]
            drawing.learned([group(each, *rewards) for each, rewards in zip(drawn, of, strict=True)])
        return sum(n % 10 == teaches for n in numbers[-320:]) / 320

    source = as_task_source(tasks, learnable=16)
    drawing = TaskCursor(source)
    assert share(drawing, 60, 0) > 0.35
    assert share(drawing, 120, 1) > 0.35  # others teach now
    # two of twenty tasks had 0, 1, 1, 0 and the others 1: as under uniform sampling
    assert drawing.sampling_metrics()["rollout/reward_mean_uniform"] == pytest.approx(0.95, abs=0.02)


def test_new_tasks_of_a_kind_that_teaches_are_drawn_more_often() -> None:
    """A hundred of the tasks are listed twice."""
    tasks = [{"n": n % 1900, "kind": f"of {n % 10}"} for n in range(2000)]
    drawing, drawn = cursor(tasks), list[Any]()
    for _ in range(100):
        drawn += (batch := drawing.take(4))
        drawing.learned([group(each, *([0.0, 1.0] if each.task["n"] % 10 == 3 else [1.0] * 2)) for each in batch])
    late = [each.task["n"] for each in drawn[200:]]
    assert sum(n % 10 == 3 for n in late) > 0.3 * len(late)
    assert len({*late}) > 0.7 * len(late)


def test_a_kind_that_teaches_is_drawn_more_often() -> None:
    drawing, numbers = cursor(kinds), Counter[int]()
    for batch in range(60):
        drawn = drawing.take(4)
        numbers.update(each.task["n"] % 4 for each in drawn if batch >= 20)
        drawing.learned([group(each, *([0.0, 1.0] if each.task["n"] % 4 == 2 else [0.0, 0.0])) for each in drawn])
    assert numbers[2] > 0.5 * numbers.total()
    assert len(numbers) == 4


def test_a_kind_whose_groups_have_equal_rewards_teaches_nothing() -> None:
    """Half of its tasks always succeed and half always fail, beside a kind that succeeds in one of eight rollouts."""
    drawing, numbers = cursor(kinds), Counter[int]()
    for batch in range(60):
        drawn = drawing.take(4)
        numbers.update(each.task["n"] % 4 for each in drawn if batch >= 20)
        first = {2: [1.0, 0.0], 6: [1.0, 0.0], 7: [1.0, 1.0]}  # rewards of a group of eight, the last repeated
        rewards = [first.get(each.task["n"], [0.0, 0.0]) for each in drawn]
        drawing.learned([group(each, *r, *r[1:] * 6) for each, r in zip(drawn, rewards, strict=True)])
    assert numbers[2] > numbers[3]


def test_variances_are_read_while_a_kind_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the data source's thread, which asks whether a pilot's task teaches, beside a draw."""
    sampler = LearnableTasks(as_task_source(kinds), seed=0, batch_size=4)
    for name in ("vstack", "append"):
        add = getattr(np, name)
        monkeypatch.setattr(np, name, lambda *args, add=add: (sampler.variances(), add(*args))[1])
    sampler.next()
    assert len(sampler.variances()) == 4


def test_without_learnable_nothing_is_kept_and_the_order_is_as_it_was() -> None:
    plain = TaskCursor(as_task_source(TASKS, seed=3))
    expected = as_task_source(TASKS, seed=3).next_batch(20)
    drawn = plain.take(20)
    plain.learned([group(each, 0.0, 1.0) for each in drawn])
    assert [each.task for each in drawn] == expected
    assert plain.sampling_state() == plain.sampling_metrics() == {}
    assert "sampling" not in plain.state()


class HardestFirst:
    """A sampler of a user's own: the task with the lowest reward so far."""

    def __init__(self, tasks: list[Any]) -> None:
        self.rewards = {task["n"]: 0.0 for task in tasks}

    def next(self) -> Any:
        return {"n": min(self.rewards, key=self.rewards.__getitem__)}

    def learned(self, task: Any, rewards: Sequence[float]) -> None:
        self.rewards[task["n"]] += 1 + sum(rewards)


def test_a_sampler_of_a_users_own() -> None:
    drawing = cursor(HardestFirst(TASKS[:3]))
    numbers = [play(drawing, 1, random.Random(0))[0] for _ in range(6)]
    assert numbers[:3] == [0, 1, 2]
    state = json.loads(json.dumps(drawing.sampling_state()))
    assert cursor(HardestFirst(TASKS[:3]), sampling=state).drawn == drawing.drawn
    with pytest.raises(ConfigError, match="a sampler of their own; leave one out"):
        as_task_source(HardestFirst(TASKS), learnable=4)


def test_a_task_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="one is not JSON"):
        LearnableTasks([{"n": {1}}], seed=0, batch_size=1)
    with pytest.raises(ConfigError, match="no tasks"):
        as_task_source([], learnable=1)


def test_groups_of_one_rollout_are_refused() -> None:
    with pytest.raises(ConfigError, match="a group of one has no variance; set it to 2 or more"):
        LoopSettings(task_sampling="learnable", n_samples_per_prompt=1)
