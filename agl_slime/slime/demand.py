"""Tasks on demand: as many groups are ready or under way as have been asked for, and no more.

slime asks for a batch when it wants one, so enqueueing ahead would only make samples older. A group that is dropped is
replaced.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agl_slime.errors import DataSourceError
from agl_slime.groups.results import GroupResult
from agl_slime.loop.tasks import Task, TaskSource
from agl_slime.slime.connection import Connection
from agl_slime.support.agl import Rollout

# So many dropped groups in a row, and at least so many for each that is wanted, are no bad luck.
_HOPELESS = 8


@dataclass
class Demand:
    """Enqueues groups of training tasks. All methods belong to the data source's loop, but for ``raise_wanted`` and
    ``taken``.

    ``announce(group_id, size, mode)`` and ``opened(rollouts)`` are the data source's; ``ready()`` counts its ready
    groups.
    """

    connection: Connection
    tasks: TaskSource
    size: int
    announce: Callable[[str, int, str], None]
    opened: Callable[[list[Rollout]], None]
    ready: Callable[[], int]
    wanted: int = 0
    drawn: int = 0
    _under_way: dict[str, Task] = field(default_factory=dict)
    _again: deque[Task] = field(default_factory=deque)
    _enqueueing: set[str] = field(default_factory=set)
    _dropped_in_a_row: int = 0
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def raise_wanted(self, groups: int) -> None:
        self.wanted = max(self.wanted, groups)

    def taken(self, groups: int) -> None:
        self.wanted = max(0, self.wanted - groups)

    async def top_up(self) -> None:
        """Enqueue what is missing."""
        async with self._lock:
            missing = self.wanted - self.ready() - len(self._under_way)
            if missing <= 0:
                return
            groups = [(uuid.uuid4().hex, task) for task in self._next(missing)]
            self._enqueueing = {group_id for group_id, _ in groups}
            for group_id, task in groups:
                self._under_way[group_id] = task
                self.announce(group_id, self.size, "train")
            self.opened(await self.connection.enqueue(groups, size=self.size, mode="train"))
            self._enqueueing = set()

    def settled(self, group: GroupResult) -> None:
        """A training group has settled. Raises ``DataSourceError`` when none is fit to train on any more."""
        self._under_way.pop(group.group_id, None)
        self._dropped_in_a_row = 0 if group.ready else self._dropped_in_a_row + 1
        if self._dropped_in_a_row >= _HOPELESS * max(1, self.wanted):
            failures = sorted(
                {f"{member.failure}: {member.failure_message}" for member in group.members if not member.ok}
            )
            raise DataSourceError(
                f"{self._dropped_in_a_row} groups in a row were not fit to train on ({group.reason}); {'; '.join(failures[:3])}"
            )

    def restart(self) -> None:
        """What was under way will never end: enqueue its tasks again."""
        self._again.extend(self._under_way.values())
        self._under_way.clear()

    def state(self) -> dict[str, Any]:
        # what may not have reached the store yet is better run twice than waited for in vain
        unsure = [self._under_way[group_id] for group_id in self._enqueueing if group_id in self._under_way]
        under_way = {group_id: task for group_id, task in self._under_way.items() if group_id not in self._enqueueing}
        return {"drawn": self.drawn, "under_way": under_way, "again": [*self._again, *unsure]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` was taken; its groups count as under way until ``restart`` says that they are gone."""
        if state["drawn"] > self.drawn:
            self.tasks.next_batch(state["drawn"] - self.drawn)  # the order depends on the seed only
            self.drawn = state["drawn"]
        self._under_way.update(state["under_way"])
        self._again.extend(state["again"])

    def _next(self, n: int) -> list[Task]:
        again = [self._again.popleft() for _ in range(min(n, len(self._again)))]
        fresh = self.tasks.next_batch(n - len(again)) if n > len(again) else []
        self.drawn += len(fresh)
        return again + fresh
