"""Where tasks come from (a list gone through in shuffled epochs, or a generator), the cursor that draws them, and the
requests that enqueue them."""

from __future__ import annotations

import json
import random
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from agl_slime.errors import ConfigError

if TYPE_CHECKING:
    from agl_slime.support.agl import EnqueueRolloutRequest

Task = dict[str, Any] | str


class TaskSource(Protocol):
    def next_batch(self, n: int) -> list[Task]: ...


Tasks = TaskSource | Iterable[Task] | Callable[[random.Random], Task]


class ShuffledTasks:
    """A fixed set of tasks, each used once per epoch, in an order that depends on the seed and the epoch only."""

    def __init__(self, *, tasks: Sequence[Task], seed: int = 0) -> None:
        if not tasks:
            raise ConfigError("there are no tasks; give at least one")
        self._row = (task for epoch in count() for task in shuffled(tasks, f"{seed}:{epoch}"))

    def next_batch(self, n: int) -> list[Task]:
        return list(islice(self._row, n))


def shuffled(tasks: Sequence[Any], seed: str) -> list[Any]:
    """``tasks`` in an order that depends on the seed only."""
    order = list(tasks)
    random.Random(seed).shuffle(order)
    return order


class GeneratedTasks:
    """Tasks made as they are needed by ``make_task(rng)``."""

    def __init__(self, *, make_task: Callable[[random.Random], Task], seed: int = 0) -> None:
        self._make_task, self._rng = make_task, random.Random(seed)

    def next_batch(self, n: int) -> list[Task]:
        return [self._make_task(self._rng) for _ in range(n)]


@dataclass(frozen=True, slots=True)
class TaskGroup:
    """A task under the group that its rollouts will be, and the instance that it is: the number, from 0, at which the
    task was drawn."""

    group_id: str
    task: Task
    instance_id: str | None = None


class TaskCursor:
    """A place in the row of tasks that ``source`` gives, which must be the same tasks in the same order in every run.

    ``finished`` are instances that were dealt with before a restart: they are passed over, once per mention, so a
    resumed run draws first what was in flight when the process died. Groups have instances only where ``named``.
    """

    def __init__(self, source: TaskSource, *, finished: Iterable[str] = (), named: bool = True) -> None:
        self._source = source
        self._named = named
        self._finished = Counter(finished)
        self._again: deque[TaskGroup] = deque()
        self._name = uuid.uuid4().hex  # with a task's number it makes the id of its group
        self.drawn = 0
        self.under_way: dict[str, TaskGroup] = {}
        """By group id, from ``take`` to ``done``."""

    def take(self, n: int) -> list[TaskGroup]:
        """The next ``n`` groups: those of ``repeat`` first."""
        groups = [self._again.popleft() for _ in range(min(n, len(self._again)))]
        while len(groups) < n:
            groups += self._draw(n - len(groups))
        self.under_way.update((group.group_id, group) for group in groups)
        return groups

    def _draw(self, n: int) -> list[TaskGroup]:
        groups = []
        for task in self._next(n):
            number, self.drawn = str(self.drawn), self.drawn + 1
            if self._finished[number]:
                self._finished[number] -= 1
            else:
                groups.append(TaskGroup(f"{self._name}-{number}", task, number if self._named else None))
        return groups

    def _next(self, n: int) -> list[Task]:
        if tasks := self._source.next_batch(n):
            return tasks
        given = f"{type(self._source).__name__}.next_batch({n}) gave none after {self.drawn}"
        raise ConfigError(f"there are no more tasks: {given}; it must begin again, or give at least one")

    def done(self, group_id: str) -> bool:
        """This group is not under way any more; whether it was."""
        return self.under_way.pop(group_id, None) is not None

    def repeat(self, *, but: Collection[str] = ()) -> None:
        """What is under way, ``but`` for these groups, will never end: ``take`` gives it again, as new groups."""
        lost = [group for name, group in self.under_way.items() if name not in but]
        self._again.extend(replace(group, group_id=uuid.uuid4().hex) for group in lost)
        self.under_way = {name: group for name, group in self.under_way.items() if name in but}

    def reconcile(self, there: Collection[str]) -> None:
        """After ``restore``: ``there`` are the groups that a store has. Those that were drawn after the state was taken
        are under way too; what is under way and not there is repeated."""
        named = (group_id.rpartition("-") for group_id in there)
        newest = max((int(number) for name, _, number in named if name == self._name), default=-1)
        if newest >= self.drawn:
            self.under_way.update((group.group_id, group) for group in self._draw(newest + 1 - self.drawn))
        self.repeat(but=there)

    def skip_instances(self, numbers: Iterable[int]) -> None:
        """Before the first ``take``: these were dealt with before a restart."""
        self._finished.update(map(str, numbers))

    def skip_to(self, drawn: int) -> None:
        """Go on as if ``drawn`` tasks had been drawn; does nothing when there were more."""
        while drawn > self.drawn:
            self.drawn += len(self._next(drawn - self.drawn))

    def state(self) -> dict[str, Any]:
        """For JSON: tasks that were drawn, those under way by group, and those to be taken again."""
        under_way = {name: group.task for name, group in self.under_way.items()}
        again = [group.task for group in self._again]
        return {"name": self._name, "drawn": self.drawn, "under_way": under_way, "again": again}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken; its groups are under way until ``repeat`` or ``reconcile`` says that they
        are gone."""
        self._name = state.get("name", self._name)
        drawn, under_way, again = state["drawn"], state["under_way"].items(), state["again"]
        self.under_way.update((group_id, TaskGroup(group_id, task)) for group_id, task in under_way)
        self._again.extend(TaskGroup(uuid.uuid4().hex, task) for task in again)
        self.skip_to(drawn)


def enqueue_requests(
    groups: Iterable[TaskGroup],
    *,
    size: int,
    mode: Literal["train", "val"],
    resources_id: str | None,
    timeout_s: float,
    max_attempts: int = 1,
    **metadata: Any,
) -> list[EnqueueRolloutRequest]:
    """``size`` rollouts per group; ``metadata`` goes beside the group's id, size and instance."""
    from agl_slime.support.agl import EnqueueRolloutRequest, RolloutConfig  # seconds to import; --help should not

    config = RolloutConfig(
        timeout_seconds=timeout_s,
        max_attempts=max_attempts,
        retry_condition=["failed", "timeout", "unresponsive"] if max_attempts > 1 else [],
    )
    return [
        EnqueueRolloutRequest(
            input=group.task,
            mode=mode,
            resources_id=resources_id,
            config=config,
            metadata={"group_id": group.group_id, "group_size": size, **metadata}
            | ({} if group.instance_id is None else {"instance_id": group.instance_id}),
        )
        for group in groups
        for _ in range(size)
    ]


def as_task_source(tasks: Tasks, *, seed: int = 0) -> TaskSource:
    if hasattr(tasks, "next_batch"):
        return tasks  # type: ignore[return-value]
    if callable(tasks):
        return GeneratedTasks(make_task=tasks, seed=seed)
    return ShuffledTasks(tasks=list(tasks), seed=seed)  # type: ignore[arg-type]


def read_tasks(path: str | Path, *, flag: str = "--tasks", strings: bool = True) -> list[Any]:
    """Tasks from a JSON-lines file, an object per line or a string; ``flag`` is what an error begins with."""
    file = Path(path)
    try:
        # not splitlines(): a JSON string may hold U+2028 and other characters that it takes for line ends
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {file}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    tasks: list[Any] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            task = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{flag} {file}, line {number}: not JSON ({error})") from error
        if not isinstance(task, dict | str if strings else dict):
            wanted = "an object or a string" if strings else "an object"
            raise ConfigError(f"{flag} {file}, line {number}: expected {wanted}, got {type(task).__name__}")
        tasks.append(task)
    if not tasks:
        raise ConfigError(f"{flag} {file}: holds no tasks")
    return tasks
