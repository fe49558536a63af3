"""Sampling of tasks by what they can still teach.

A group teaches by the differences of its rewards. ``LearnableTasks`` keeps the mean and the spread of each task's
rewards, the older ones counting less as the policy moves, and draws a task with a chance in proportion to the variance
that a group of it probably has. Each fourth draw is the task that was drawn longest ago, so that each comes again
within four draws per task. A draw depends only on the seed, its number and the rewards learned before it.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from agl_slime.data.enqueueing import Task
from agl_slime.errors import ConfigError

OLDEST_EVERY = 4
"""Every so many draws comes the task that was drawn longest ago."""
_HALF_LIFE = 16.0  # policy updates after which a reward counts half
_PSEUDO_REWARDS = 4.0  # of the average variance of its kind, with which each task begins
_CANDIDATES = 8  # tasks of a source of which the next is chosen
_MIN_VARIANCE = 1e-12  # variance of a task
_N, _SUM, _SPREAD, _UPDATE, _DRAWN, _WEIGHT = range(6)  # columns: rewards, their sum, the groups' variances times their
# sizes, the last policy update that the row knows, the last draw, and how often the source has the task


class TaskSampler(Protocol):
    """Chooses tasks by the rewards of earlier groups. Both methods are called one at a time. With ``state() -> dict``
    (for JSON) and ``restore(state)`` a resumed run continues with what was learned; without, it learns anew."""

    def next(self) -> Task:
        """The next task, an object of JSON."""
        ...

    def learned(self, task: Task, rewards: Sequence[float]) -> None:
        """Note the rewards of a group of ``task``; none if all of its rollouts failed."""
        ...


def task_key(task: Task) -> str:
    """A digest of the task. Raises ``ConfigError`` for a task that JSON cannot hold, as checkpoints keep it."""
    try:
        return hashlib.blake2b(json.dumps(task, sort_keys=True).encode(), digest_size=8).hexdigest()
    except (TypeError, ValueError) as error:
        why = f"a sampler's tasks are kept in checkpoints, and one is not JSON ({error})"
        raise ConfigError(f"{why}; use plain values, or task_sampling uniform") from error


class LearnableTasks:
    """A ``TaskSampler`` of listed ``tasks``, or of a ``TaskSource``, whose tasks are told apart by ``task["kind"]``:
    the next is one of its next eight. A new listed task has its kind's average variance. ``batch_size``: groups per
    policy update."""

    def __init__(self, tasks: Any, *, seed: int, batch_size: int) -> None:
        self._seed, self._batch_size = seed, batch_size
        self._source, listed = (tasks, ()) if hasattr(tasks, "next_batch") else (None, [*tasks])
        if self._source is None and not listed:
            raise ConfigError("there are no tasks; give at least one")
        order = [*listed]
        random.Random(f"{seed}:order").shuffle(order)
        keys = [task_key(task) for task in order]
        distinct = dict(zip(keys, order, strict=True))
        self._tasks: list[Task] = [*distinct.values()]
        self._index = {key: place for place, key in enumerate(distinct)}
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(map(_kind, self._tasks)))}
        self._kinds = np.array([kinds[_kind(task)] for task in self._tasks], dtype=np.int64)  # of rows; of a source's 0
        self._table = np.zeros((len(self._index), 6))
        np.add.at(self._table[:, _WEIGHT], [self._index[key] for key in keys], 1)
        self._table[:, _DRAWN] = np.arange(len(self._table)) - len(self._table)  # as if drawn in this order before
        self._draws = self._groups = self._candidates_drawn = 0
        self._range: list[float] = []
        self._bounds: np.ndarray | None = None

    def next(self) -> Task:
        rng, longest_ago = random.Random(f"{self._seed}:{self._draws}"), self._draws % OLDEST_EVERY == OLDEST_EVERY - 1
        if self._source is None:
            place = int(self._table[:, _DRAWN].argmin()) if longest_ago else self._choose(rng)
            task = self._tasks[place]
        else:
            tasks = self._candidates(_CANDIDATES)
            places = [self._row_of(task) for task in tasks]
            for each in places:
                self._table[each, _WEIGHT] += 1
            if longest_ago:
                chosen = int(self._table[places, _DRAWN].argmin())
            else:
                chances = (self.variances()[places] + _MIN_VARIANCE).tolist()
                [chosen] = rng.choices(range(len(tasks)), weights=chances)
            task, place = tasks[chosen], places[chosen]
        self._table[place, _DRAWN] = self._draws
        self._draws += 1
        return task

    def learned(self, task: Task, rewards: Sequence[float]) -> None:
        now, self._bounds = self._groups / self._batch_size, None
        self._groups += 1
        if len(rewards) < 2:
            return
        row = self._table[self._row_of(task)]
        row[:_UPDATE] *= 0.5 ** ((now - row[_UPDATE]) / _HALF_LIFE)
        row[:_UPDATE] += len(rewards), sum(rewards), len(rewards) * float(np.var(rewards, ddof=1))
        row[_UPDATE] = now
        self._range = [min(*self._range, *rewards, rewards[0]), max(*self._range, *rewards, rewards[0])]

    def variances(self) -> np.ndarray:
        """The probable variance of a group's rewards, of each task: that within its groups so far, beside pseudo
        rewards with the average variance of its kind. Another thread may meanwhile add a row."""
        table = self._table
        kinds, numbers = self._kinds[: len(table)], table[:, _N]
        decay = 0.5 ** ((self._groups / self._batch_size - table[:, _UPDATE]) / _HALF_LIFE)
        spread = table[:, _SPREAD] / np.maximum(numbers, 1e-12)
        counts, (low, high) = numbers * decay, self._range or [0.0, 1.0]
        weights = counts / (_PSEUDO_REWARDS + counts)
        average = (weights @ spread + (high - low) ** 2 / 4) / (weights.sum() + 1)
        of_kinds = np.bincount(kinds, weights * spread), np.bincount(kinds, weights)
        expected = ((of_kinds[0] + average) / (of_kinds[1] + 1))[kinds]
        return (_PSEUDO_REWARDS * expected + counts * spread) / (_PSEUDO_REWARDS + counts)

    def teaches(self, task: Task) -> bool:
        """Whether the task's rewards probably have at least half of the largest variance."""
        low, high = self._range or [0.0, 1.0]
        return float(self.variances()[self._row_of(task)]) >= (high - low) ** 2 / 8

    def uniform_mean(self) -> float | None:
        """The mean reward as under uniform sampling: of the tasks' means, each as often as the source has it."""
        rows = self._table[self._table[:, _N] > 0]
        return float(np.average(rows[:, _SUM] / rows[:, _N], weights=rows[:, _WEIGHT])) if len(rows) else None

    def state(self) -> dict[str, Any]:
        rows = {key: self._table[place].tolist() for key, place in self._index.items()}
        drawn = {key: row for key, row in rows.items() if self._source is not None or row[_DRAWN] >= 0}
        numbers = {"draws": self._draws, "groups": self._groups, "made": self._candidates_drawn}
        return {**numbers, "range": self._range, "tasks": drawn}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._draws, self._groups = state["draws"], state["groups"]
        self._range = state["range"]
        while self._source is not None and self._candidates_drawn < state["made"]:
            self._candidates(min(1_000, state["made"] - self._candidates_drawn))
        for key, row in state["tasks"].items():
            place = self._row_of_key(key)
            self._table[place] = row
        self._bounds = None

    def _choose(self, rng: random.Random) -> int:
        if self._bounds is None:
            self._bounds = np.cumsum(self.variances() * self._table[:, _WEIGHT] + _MIN_VARIANCE)
        return int(np.searchsorted(self._bounds, rng.random() * self._bounds[-1], side="right"))

    def _candidates(self, n: int) -> list[Task]:
        assert self._source is not None
        tasks: list[Task] = []
        while len(tasks) < n:
            if not (more := self._source.next_batch(n - len(tasks))):
                raise ConfigError(f"{type(self._source).__name__}.next_batch returned no task; it must start over")
            tasks += more
        self._candidates_drawn += n
        return tasks

    def _row_of(self, task: Task) -> int:
        """The task's row; of a source's, that of its kind."""
        return self._row_of_key(task_key(task) if self._source is None else _kind(task))

    def _row_of_key(self, key: str) -> int:
        if (place := self._index.setdefault(key, len(self._index))) == len(self._table):
            self._kinds = np.append(self._kinds, 0)  # first, for ``variances`` in another thread
            self._table = np.vstack([self._table, [[0, 0, 0, 0, -1, 0]]])
        return place


def _kind(task: Task) -> str:
    return str(task.get("kind", "")) if isinstance(task, dict) else ""
