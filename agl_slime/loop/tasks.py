"""Task sources (shuffled epochs of a list, or a generator), and the cursor that draws tasks."""

from __future__ import annotations

import random
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, cycle, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agl_slime.data.enqueueing import Task, TaskGroup
from agl_slime.errors import ConfigError
from agl_slime.loop.sampling import LearnableTasks, TaskSampler, task_key
from agl_slime.loop.task_files import read_rows, without_bytes
from agl_slime.metric_names import REWARD_MEAN_UNIFORM

if TYPE_CHECKING:  # Agent Lightning takes seconds to import
    from agl_slime.data.results import GroupResult


class TaskSource(Protocol):
    def next_batch(self, n: int) -> list[Task]: ...


Tasks = TaskSource | TaskSampler | Iterable[Task] | Callable[[random.Random], Task]


class EndlessTasks:
    """The ``TaskSource`` of an iterator without end."""

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._tasks = tasks

    def next_batch(self, n: int) -> list[Task]:
        return list(islice(self._tasks, n))


class SampledTasks:
    """The ``TaskSource`` of a ``TaskSampler``."""

    def __init__(self, sampler: TaskSampler) -> None:
        self.sampler = sampler

    def next_batch(self, n: int) -> list[Task]:
        tasks = [self.sampler.next() for _ in range(n)]
        for task in tasks:
            task_key(task)
        return tasks


def shuffled(tasks: Sequence[Any], seed: str) -> list[Any]:
    """``tasks`` in an order that depends only on the seed."""
    order = list(tasks)
    random.Random(seed).shuffle(order)
    return order


def shuffled_tasks(tasks: Sequence[Task], *, seed: int = 0) -> EndlessTasks:
    """Each task once per epoch, in an order that depends only on seed and epoch."""
    if not tasks:
        raise ConfigError("there are no tasks; give at least one")
    return EndlessTasks(task for epoch in count() for task in shuffled(tasks, f"{seed}:{epoch}"))


def ordered_tasks(tasks: Sequence[Task]) -> EndlessTasks:
    """The tasks in the order in which they are listed, over and over."""
    return EndlessTasks(cycle(tasks))


class TaskCursor:
    """A position in the tasks of ``source``, which must yield the same tasks in the same order in every run.

    ``finished`` are instances that were finished before a restart; each is skipped once per mention, so a resumed run
    first draws the tasks that were in flight when the process died. Groups have instance ids only with ``named``.
    The tasks of ``SampledTasks`` depend on the run: ``sampling`` is the ``sampling_state`` from before the restart.
    """

    def __init__(
        self,
        source: TaskSource,
        *,
        finished: Iterable[str] = (),
        named: bool = True,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self._source = source
        self._sampler = source.sampler if isinstance(source, SampledTasks) else None
        self._lock = threading.Lock()
        self._unlearned: deque[tuple[str, Task, list[float]]] = deque()
        self._sampled: dict[str, Task] = {}  # of a sampler, by number, until their rewards are learned
        self._unfinished: deque[tuple[str, Task]] = deque()  # of them, those from before the restart
        self._named = named
        self._finished = Counter(finished)
        self._repeated: deque[TaskGroup] = deque()
        self._name = uuid.uuid4().hex  # prefix of group ids
        self.drawn = 0
        self.in_flight: dict[str, TaskGroup] = {}
        """Groups by id, from ``take`` to ``done``."""
        if sampling and self._sampler is not None:
            self._restore_sampling(sampling)
            self._unfinished.extend(self._sampled.items())

    def take(self, n: int) -> list[TaskGroup]:
        """The next ``n`` groups, repeated ones first."""
        groups = [self._repeated.popleft() for _ in range(min(n, len(self._repeated)))]
        with self._lock:
            self._learn()
            while len(groups) < n:
                groups += self._draw(n - len(groups))
        self.in_flight.update((group.group_id, group) for group in groups)
        return groups

    def learned(self, groups: Iterable[GroupResult]) -> None:
        """Tell the sampler, if there is one, the rewards of finalized groups before the next draw."""
        for group in groups if self._sampler is not None else ():
            rewards = [member.reward for member in group.succeeded if member.reward is not None]
            self._unlearned.append((group.instance_id or "", group.members[0].task, rewards))

    def teaches(self, task: Any) -> bool:
        """Whether the sampler, if there is one, expects differing rewards of the task."""
        return getattr(self._sampler, "teaches", lambda _: False)(task)

    def sampling_metrics(self) -> dict[str, float]:
        mean = getattr(self._sampler, "uniform_mean", lambda: None)()
        return {} if mean is None else {REWARD_MEAN_UNIFORM: mean}

    def sampling_state(self) -> dict[str, Any]:
        """The sampler's state for JSON; empty without one."""
        if self._sampler is None:
            return {}
        with self._lock:
            self._learn()
            state = getattr(self._sampler, "state", lambda: None)()
            return {"drawn": self.drawn, "tasks": {**self._sampled}, "sampler": state}

    def _learn(self) -> None:
        learned = [self._unlearned.popleft() for _ in range(len(self._unlearned))]
        for number, task, rewards in sorted(learned, key=lambda group: int(group[0] or 0)):
            assert self._sampler is not None
            self._sampler.learned(task, rewards)
            self._sampled.pop(number, None)

    def _restore_sampling(self, state: Mapping[str, Any]) -> None:
        self.drawn = state["drawn"]
        self._sampled.update(sorted(state["tasks"].items(), key=lambda item: int(item[0])))
        if state["sampler"] is not None and hasattr(self._sampler, "restore"):
            self._sampler.restore(state["sampler"])  # type: ignore[union-attr]

    def _numbered(self, n: int) -> list[tuple[str, Task]]:
        if self._unfinished:
            return [self._unfinished.popleft() for _ in range(min(n, len(self._unfinished)))]
        tasks = [(str(number), task) for number, task in enumerate(self._next(n), self.drawn)]
        self.drawn += len(tasks)
        if self._sampler is not None and self._named:
            self._sampled.update(tasks)
        return tasks

    def _draw(self, n: int) -> list[TaskGroup]:
        groups = []
        for number, task in self._numbered(n):
            if self._finished[number]:
                self._finished[number] -= 1
            else:
                groups.append(TaskGroup(f"{self._name}-{number}", task, number if self._named else None))
        return groups

    def _next(self, n: int) -> list[Task]:
        if tasks := self._source.next_batch(n):
            return tasks
        result = f"{type(self._source).__name__}.next_batch({n}) returned none after {self.drawn}"
        raise ConfigError(f"there are no more tasks: {result}; it must start over, or return at least one")

    def done(self, group_id: str) -> bool:
        """Remove a group from ``in_flight``; returns whether it was there."""
        return self.in_flight.pop(group_id, None) is not None

    def repeat(self, *, keep: Collection[str] = ()) -> None:
        """Draw the lost groups in flight again, under new ids: all but ``keep``."""
        lost = [group for name, group in self.in_flight.items() if name not in keep]
        self._repeated.extend(map(_renamed, lost))
        self.in_flight = {name: group for name, group in self.in_flight.items() if name in keep}

    def reconcile(self, stored: Collection[str]) -> None:
        """Adopt, after ``restore``, the groups that the store has: groups drawn after the state was saved are in
        flight, too; groups in flight that are not ``stored`` are drawn again."""
        numbered = (group_id.rpartition("-") for group_id in stored)
        newest = max((int(number) for name, _, number in numbered if name == self._name), default=-1)
        if newest >= self.drawn:
            self.in_flight.update((group.group_id, group) for group in self._draw(newest + 1 - self.drawn))
        self.repeat(keep=stored)

    def skip_instances(self, numbers: Iterable[int]) -> None:
        """Skip tasks that were finished before a restart; to be called before the first ``take``."""
        self._finished.update(map(str, numbers))

    def skip_to(self, drawn: int) -> None:
        """Skip tasks until ``drawn`` have been drawn; does nothing if that many were."""
        while drawn > self.drawn:
            self.drawn += len(self._next(drawn - self.drawn))

    def state(self) -> dict[str, Any]:
        """The position, the groups in flight and the tasks to repeat, for JSON."""
        in_flight = {name: group.task for name, group in self.in_flight.items()}
        repeated = {group.group_id: group.task for group in self._repeated}
        sampling = {"sampling": self.sampling_state()} if self._sampler is not None else {}
        return {"name": self._name, "drawn": self.drawn, "under_way": in_flight, "again": repeated, **sampling}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from ``state``; call ``repeat`` or ``reconcile`` next, as its groups in flight may be lost."""
        self._name = state.get("name", self._name)
        in_flight, repeated = state["under_way"].items(), state["again"].items()
        self.in_flight.update((group_id, TaskGroup(group_id, task)) for group_id, task in in_flight)
        self._repeated.extend(_renamed(TaskGroup(group_id, task)) for group_id, task in repeated)
        if self._sampler is not None and "sampling" in state:
            self._restore_sampling(state["sampling"])
        self.skip_to(state["drawn"])


def _renamed(group: TaskGroup) -> TaskGroup:
    """``group`` under a new id with the same end, its number, from which its rollouts have their seeds."""
    return replace(group, group_id=f"{uuid.uuid4().hex}-{group.group_id.rpartition('-')[2]}")


class ValidationTasks:
    """The first ``n`` tasks of ``source``, each ``times`` in succession, the same in every validation, so that
    validations can be compared."""

    def __init__(self, source: TaskSource, *, n: int, times: int = 1) -> None:
        self._source, self._n, self.times = source, n, times
        self._tasks: list[Task] = []

    def draw(self) -> list[TaskGroup]:
        """A new group of rollouts for each task. The first call makes the tasks."""
        if not self._tasks:
            groups = TaskCursor(self._source, named=False).take(self._n)
            self._tasks = [group.task for group in groups for _ in range(self.times)]
        name = uuid.uuid4().hex
        return [TaskGroup(f"{name}-{number}", task) for number, task in enumerate(self._tasks)]


def as_task_source(tasks: Tasks, *, seed: int = 0, learnable: int = 0) -> TaskSource:
    """``learnable``: draw tasks that can still teach (``LearnableTasks``); the number of groups per policy update."""
    if hasattr(tasks, "learned"):
        if learnable:
            raise ConfigError("task_sampling is 'learnable' and the tasks have a sampler of their own; leave one out")
        return SampledTasks(tasks)  # type: ignore[arg-type]
    if learnable:
        drawn = as_task_source(tasks, seed=seed) if callable(tasks) or hasattr(tasks, "next_batch") else tasks
        return SampledTasks(LearnableTasks(drawn, seed=seed, batch_size=learnable))
    if hasattr(tasks, "next_batch"):
        return tasks  # type: ignore[return-value]
    if callable(tasks):
        return EndlessTasks(map(tasks, repeat(random.Random(seed))))
    return shuffled_tasks(list(tasks), seed=seed)  # type: ignore[arg-type]


def read_tasks(path: str | Path, *, flag: str = "--tasks", strings: bool = True) -> list[Any]:
    """Tasks from a file of ``agl_slime.loop.task_files``, each an object or, in JSON lines, a string; errors begin with
    ``flag``."""
    tasks: list[Any] = []
    for place, task in read_rows(path, flag=flag):
        if not isinstance(task, dict | str if strings else dict):
            expected = "an object or a string" if strings else "an object"
            raise ConfigError(f"{place}: expected {expected}, got {type(task).__name__}")
        tasks.append(without_bytes(task, place))
    if not tasks:
        raise ConfigError(f"{flag} {path}: contains no tasks")
    return tasks
