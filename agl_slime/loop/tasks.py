"""Where tasks come from: a list gone through in shuffled epochs, or a generator."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from agl_slime.errors import ConfigError

Task = dict[str, Any]


class TaskSource(Protocol):
    def next_batch(self, n: int) -> list[Task]:
        """The next ``n`` tasks."""
        ...


class ShuffledTasks:
    """A fixed set of tasks, each used once per epoch, in an order that depends on the seed and the epoch only."""

    def __init__(self, *, tasks: Sequence[Task], seed: int = 0) -> None:
        if not tasks:
            raise ConfigError("there are no tasks; give at least one")
        self._tasks = list(tasks)
        self._seed = seed
        self._epoch = 0
        self._order = self._shuffled()
        self._position = 0

    def next_batch(self, n: int) -> list[Task]:
        batch: list[Task] = []
        while len(batch) < n:
            if self._position == len(self._order):
                self._epoch += 1
                self._order = self._shuffled()
                self._position = 0
            batch.append(self._tasks[self._order[self._position]])
            self._position += 1
        return batch

    def _shuffled(self) -> list[int]:
        order = list(range(len(self._tasks)))
        random.Random(f"{self._seed}:{self._epoch}").shuffle(order)
        return order


class GeneratedTasks:
    """Tasks made as they are needed by ``make_task(rng)``."""

    def __init__(self, *, make_task: Callable[[random.Random], Task], seed: int = 0) -> None:
        self._make_task = make_task
        self._rng = random.Random(seed)

    def next_batch(self, n: int) -> list[Task]:
        return [self._make_task(self._rng) for _ in range(n)]


class NumberedTasks:
    """Tasks with the names of their instances: the number, from 0, at which each was drawn. Instances that a former
    life of the run has dealt with are passed over, so a resumed run draws first what was in flight when that life
    ended. The source must give the same tasks in the same order.
    """

    def __init__(self, *, source: TaskSource, finished: Iterable[str] = ()) -> None:
        self._source = source
        self._finished = set(finished)
        self.drawn = 0

    def skip_to(self, drawn: int) -> None:
        """Go on as if ``drawn`` tasks had been drawn; does nothing when there were more."""
        if drawn > self.drawn:
            self._source.next_batch(drawn - self.drawn)
            self.drawn = drawn

    def next_batch(self, n: int) -> list[tuple[str, Task]]:
        """The next ``n`` instances that have not been dealt with."""
        batch: list[tuple[str, Task]] = []
        while len(batch) < n:
            for task in self._source.next_batch(n - len(batch)):
                instance_id, self.drawn = str(self.drawn), self.drawn + 1
                if instance_id in self._finished:
                    self._finished.discard(instance_id)
                else:
                    batch.append((instance_id, task))
        return batch


def as_task_source(
    tasks: TaskSource | Iterable[Task] | Callable[[random.Random], Task], *, seed: int = 0
) -> TaskSource:
    """A list of tasks, a function of a random generator, or a ``TaskSource`` as it is."""
    if hasattr(tasks, "next_batch"):
        return tasks  # type: ignore[return-value]
    if callable(tasks):
        return GeneratedTasks(make_task=tasks, seed=seed)
    return ShuffledTasks(tasks=list(tasks), seed=seed)  # type: ignore[arg-type]


def read_tasks(path: str | Path, *, flag: str = "--tasks") -> list[Task]:
    """Tasks from a JSON-lines file, one object per line. Raises ``ConfigError`` naming ``flag``, the file and the line
    that is not one."""
    file = Path(path)
    try:
        # not splitlines(): a JSON string may hold U+2028 and other characters that it takes for line ends
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {file}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    tasks: list[Task] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            task = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{flag} {file}, line {number}: not JSON ({error})") from error
        if not isinstance(task, dict):
            raise ConfigError(f"{flag} {file}, line {number}: expected an object, got {type(task).__name__}")
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"{flag} {file}: holds no tasks")
    return tasks
