"""Settings of a data source that polls often, and a listener of it."""

import asyncio
import threading
from collections.abc import Callable

from agl_slime.data.results import GroupResult, MemberResult, Outcome
from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.types import Sample

QUICK = DataSourceSettings(get_timeout_s=20.0, poll_interval_s=0.01)


class Listener:
    """The members and groups that a data source has announced, and a way to wait for them."""

    def __init__(self, source: GroupSource) -> None:
        self.members: list[MemberResult] = []
        self.groups: list[GroupResult] = []
        self._changed = threading.Condition()
        source.listen(on_member=self._member, on_group=self._group)

    def _member(self, member: MemberResult) -> None:
        with self._changed:
            self.members.append(member)
            self._changed.notify_all()

    def _group(self, group: GroupResult) -> None:
        with self._changed:
            self.groups.append(group)
            self._changed.notify_all()

    async def until(self, true: Callable[[], bool]) -> None:
        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(true, 20)

        assert await asyncio.to_thread(wait), f"members {self.members}, groups {self.groups}"

    @property
    def failures(self) -> list[str | None]:
        return [member.failure for member in self.members if not member.ok]


async def get(source: GroupSource, n: int) -> list[list[Sample]]:
    return await asyncio.to_thread(source.get_samples, n)


def counts_of(source: GroupSource) -> dict[Outcome, int]:
    counts = source.ledger.counts()
    assert counts.opened == counts.open + counts.ready + sum(counts.closed.values())
    return counts.closed
