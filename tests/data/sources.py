"""A running data source over a store, whose groups a test opens as the loop does and finishes as runners do."""

from collections.abc import Iterable
from typing import Any, Self

from agl_slime.data.results import Outcome
from agl_slime.data.source import DataSourceSettings, GroupSource
from agl_slime.store.bridge import BridgeStore
from agl_slime.types import Sample
from tests.harness.datasource import QUICK, Listener, counts_of, get
from tests.harness.stores import enqueue_group, finish


class Running:
    def __init__(self, store: Any = None, settings: DataSourceSettings = QUICK, **options: Any) -> None:
        self.store = store if store is not None else BridgeStore()
        self.source = GroupSource(store=self.store, settings=settings, **options)
        self.listener = Listener(self.source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.source.stop()

    async def opened(self, group_id: str = "g", *, size: int = 1, **metadata: str) -> list[str]:
        """The ids of an announced group."""
        self.source.expect(group_id, size=size)
        rollouts = await enqueue_group(self.store, group_id, size=size, **metadata)
        self.source.opened(rollouts)
        return [rollout.rollout_id for rollout in rollouts]

    async def finish(self, rollout_ids: Iterable[str], **end: Any) -> None:
        for rollout_id in rollout_ids:
            await finish(self.store, rollout_id, **end)

    async def get(self, n: int = 1) -> list[list[Sample]]:
        return await get(self.source, n)

    async def get_ids(self, n: int = 1) -> list[list[str]]:
        return [[sample.metadata["agl_rollout_id"] for sample in group] for group in await self.get(n)]

    async def until_groups(self, n: int = 1) -> None:
        """Wait until ``n`` groups were finalized."""
        await self.listener.until(lambda: len(self.listener.groups) == n)

    async def until_members(self, n: int) -> None:
        await self.listener.until(lambda: len(self.listener.members) == n)

    @property
    def counts(self) -> dict[Outcome, int]:
        return counts_of(self.source)

    def reason(self, outcome: Outcome, reason: str) -> int:
        """How many rollouts ended as ``outcome`` with ``reason``."""
        return self.source.ledger.counts().reasons[outcome, reason]
