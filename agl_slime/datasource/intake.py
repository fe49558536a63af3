"""From the end of a rollout to its group: read, converted, taken in by the assembler, told to whoever listens."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from agl_slime.datasource.ends import EndFollower
from agl_slime.groups.assembler import GroupAssembler
from agl_slime.groups.results import GroupResult, MemberResult
from agl_slime.store.bridge import FINISHED
from agl_slime.support.agl import EnqueueRolloutRequest, Rollout

logger = logging.getLogger(__name__)


class Producer:
    """Who enqueues the rollouts of a ``GroupSource``, as far as that tells it what happens. This one is somebody else:
    it is told nothing, and nothing is known of it. ``finalized``, ``delivered``, ``follow_up``, ``store_restarted``,
    ``state`` and ``restore`` are called under the source's lock."""

    source: Any  # set by that ``GroupSource``

    def finalized(self, group: GroupResult) -> None:
        """A group was finalized."""

    def delivered(self, groups: int) -> None:
        """So many groups were delivered."""

    def follow_up(self) -> None:
        """Something has changed: enqueue what is missing."""

    def store_restarted(self) -> None:
        """All that was in flight is lost."""

    def time_passed(self) -> None:
        """Now and then."""

    def failed(self, error: BaseException) -> None:
        """The source's thread cannot go on."""

    async def before_following(self) -> None:
        """A remote store is followed from now on."""

    def raise_if_dead(self) -> None:
        """Raise ``DataSourceError`` when nothing more can be produced."""

    @property
    def endless(self) -> bool:
        """Whether more is to come as long as this lives."""
        return False

    def state(self) -> dict[str, Any]:
        """What it needs to go on from, for JSON."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what ``state`` gave."""


class Intake:
    """Takes in what an ``EndFollower`` finds to have ended, and has done in the store what the groups ask for.
    ``changed`` guards everything but the ledger, which is safe by itself.

    Args:
        read: the result of a rollout; ``None`` while it has not ended.
        default_size: of groups that nobody announced.
        follower: as ``EndFollower`` takes them.
    """

    def __init__(
        self,
        store: Any,
        *,
        assembler: GroupAssembler,
        producer: Producer,
        changed: threading.Condition,
        read: Callable[[str], Awaitable[MemberResult | None]],
        default_size: int,
        **follower: Any,
    ) -> None:
        self.assembler, self.producer, self.changed, self.read = assembler, producer, changed, read
        self.follower = EndFollower(store, self, changed=changed, **follower)
        self.failure: BaseException | None = None
        self.announced = False
        self.on_member: Callable[[MemberResult], None] | None = None
        self.on_group: Callable[[GroupResult], None] | None = None
        self._store, self._default_size = store, default_size
        self._reading: dict[str, bool] = {}  # whether it may have ended after the look that is under way

    @property
    def unread(self) -> list[str]:
        """Rollouts that have ended, for all that is known, and are not taken in."""
        return [*self._reading, *self.follower.to_read]

    def follow_up(self) -> None:
        """Have done in the store what the groups ask for."""
        if unwanted := self.assembler.take_unwanted():
            self.follower.submit(self.cancel, unwanted)
        if retries := self.assembler.take_retries():
            self.follower.submit(self._run_again, [one.request for one in retries])
        self.producer.follow_up()

    def opened(self, rollouts: Sequence[Rollout | str]) -> None:
        """These rollouts were enqueued."""
        with self.changed:
            self.assembler.opened(rollouts)
            self.follow_up()

    async def cancel(self, rollout_ids: Sequence[str]) -> None:
        """Cancel these in the store, as far as they have not ended."""
        for rollout_id in rollout_ids:
            try:
                rollout = await self._store.get_rollout_by_id(rollout_id)
                if rollout is not None and rollout.status not in FINISHED:
                    await self._store.update_rollout(rollout_id, status="cancelled")
            except Exception as error:  # it runs to its end and counts as late: engine time is at stake, not data
                logger.warning("Rollout %s could not be cancelled in the store: %s", rollout_id, error)

    # -- what the follower tells --------------------------------------------------------------------------------------

    async def look(self, rollout_id: str) -> None:
        """Read a rollout that may have ended."""
        with self.changed:
            self.follower.to_read.discard(rollout_id)
            if rollout_id in self._reading:
                self._reading[rollout_id] = True
                return
            known = self.assembler.has_ended(rollout_id)
            if known:
                self.follower.table.read(rollout_id, ended=False)
            else:
                self._reading[rollout_id] = False
        while not known:
            member = await self.follower.patiently(lambda: self.read(rollout_id))
            known = self._take(rollout_id, member)
        await self.follower.release_due()

    def in_flight(self) -> list[str] | None:
        """Those to poll a store about; ``None`` when nobody announces any."""
        ids = self.assembler.ledger.open_ids()
        return ids if ids or self.announced else None

    async def before_following(self) -> None:
        await self.producer.before_following()

    def store_restarted(self) -> None:
        logger.warning("The store was restarted; %d rollouts in flight are lost.", self.assembler.ledger.counts().open)
        self.assembler.lose("store_restarted")
        self.producer.store_restarted()

    def time_passed(self) -> None:
        with self.changed:
            late = self.assembler.late()
            for group in late:
                self._finalized(group)
            self.follow_up()
        for group in late:
            self._tell(None, group)
        self.producer.time_passed()

    def failed(self, error: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or error  # what came first is what is told
            self.changed.notify_all()
        logger.debug("The data source failed.", exc_info=error)
        self.producer.failed(self.failure)

    def _take(self, rollout_id: str, member: MemberResult | None) -> bool:
        """Take in what was read; ``False`` when it has to be read again."""
        taken = None
        with self.changed:  # one step, so that a saved state has the rollout in one place
            if member is None and self._reading[rollout_id]:
                self._reading[rollout_id] = False
                return False
            del self._reading[rollout_id]
            self.follower.table.read(rollout_id, ended=member is not None)
            if member is not None:
                size = member.group_size or (self._default_size if member.mode == "train" else 1)
                taken = self.assembler.add(member, default_size=size)
                if taken is not None and taken[1] is not None:
                    self._finalized(taken[1])
                self.follow_up()
        if taken is not None:
            self._tell(*taken)
        return True

    def _finalized(self, group: GroupResult) -> None:
        self.producer.finalized(group)
        self.changed.notify_all()

    def _tell(self, member: MemberResult | None, group: GroupResult | None) -> None:
        """What has ended, to whoever listens; outside of the lock."""
        if self.on_member is not None:
            stragglers = [one for one in group.members if one.straggler] if group is not None else []
            for one in [member, *stragglers] if member is not None else stragglers:
                self.on_member(one)
        if group is not None and self.on_group is not None:
            self.on_group(group)

    async def _run_again(self, requests: list[EnqueueRolloutRequest]) -> None:
        """Enqueue failed members that a policy wants to be run again, under the same group."""
        self.opened(await self.follower.patiently(lambda: self._store.enqueue_many_rollouts(requests)))
