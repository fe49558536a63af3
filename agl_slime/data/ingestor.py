"""Ingestion of completed rollouts: each is read, converted, added to its group and reported to the listeners."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from operator import attrgetter
from typing import Any

from agl_slime.data.assembler import GroupAssembler
from agl_slime.data.completions import CompletionFollower
from agl_slime.data.results import GroupResult, MemberResult, OnEnd
from agl_slime.errors import EngineProtocolError
from agl_slime.metric_names import FAILED
from agl_slime.store.bridge import FINISHED
from agl_slime.support.agl import EnqueueRolloutRequest, Rollout
from agl_slime.tokens.reward import UNNAMED

logger = logging.getLogger(__name__)


class Producer:
    """Callbacks of a ``GroupSource`` to the component that enqueues its rollouts; this base class ignores all of them.

    All but ``time_passed``, ``before_following`` and ``raise_if_dead`` are called under the source's lock."""

    source: Any  # set by the ``GroupSource``

    def finalized(self, group: GroupResult) -> None:
        """A group was finalized."""

    def delivered(self, groups: int) -> None:
        """This number of groups was delivered."""

    def follow_up(self) -> None:
        """State changed: enqueue missing rollouts."""

    def store_restarted(self) -> None:
        """Every rollout in flight is lost."""

    def time_passed(self) -> None:
        """A tick of the follower, about once a second."""

    async def before_following(self) -> None:
        """The source is about to follow a remote store."""

    def raise_if_dead(self) -> None:
        """Raise ``DataSourceError`` when this producer has failed."""

    @property
    def endless(self) -> bool:
        """Whether this producer enqueues rollouts without end."""
        return False

    def state(self) -> dict[str, Any]:
        """The producer's part of a saved state, for JSON."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from the result of ``state``."""


class RolloutIngestor:
    """Reads the rollouts that a ``CompletionFollower`` reports, adds them to their groups, and cancels and retries
    rollouts as the groups ask. ``changed`` guards everything but the ledger, which is thread-safe.

    Args:
        read: the result of a rollout; ``None`` while it has not ended.
        default_size: size of groups that were not announced.
        run_key: the name of the reward that the run trains on, if it is declared.
        patience_s: longest wait for the rollout that decides the name.
        follower: arguments of ``CompletionFollower``.
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
        run_key: str | None = None,
        patience_s: float | None = None,
        **follower: Any,
    ) -> None:
        self.assembler, self.producer, self.changed, self.read = assembler, producer, changed, read
        self.follower = CompletionFollower(store, self, changed=changed, **follower)
        self.failure: BaseException | None = None
        self.announced = False
        self.on_member: Callable[[MemberResult], None] | None = None
        self.on_group: Callable[[GroupResult], None] | None = None
        self.on_end: dict[str, OnEnd] = {}  # by group
        self.run_key, self._patience_s = run_key, patience_s or math.inf
        self._order: dict[str, None] = {}  # rollouts in their order, until one has decided ``run_key``
        self._unread_elsewhere: frozenset[str] = frozenset()  # unread rollouts that another process enqueued
        self._waiting: dict[str, str] = {}  # ended rollouts with named rewards, and the first name of each
        self._name_awaited_since = math.inf
        self._store, self._default_size = store, default_size
        self._false_answers: Counter[str] = Counter()  # rollouts that failed by them, by the engine's address
        self._reading: dict[str, bool] = {}  # whether it was reported again during the current read

    @property
    def unread(self) -> list[str]:
        """Rollouts that were reported as completed and are not added to their groups yet."""
        return [*self._reading, *self.follower.pending_reads]

    def follow_up(self) -> None:
        """Cancel and retry rollouts as the groups ask, and let the producer enqueue more."""
        if unwanted := self.assembler.take_unwanted():
            self.follower.submit(self.cancel, unwanted)
        if requests := self.assembler.take_requests():
            self.follower.submit(self._enqueue, requests)
        self.producer.follow_up()

    def opened(self, rollouts: Sequence[Rollout | str]) -> None:
        with self.changed:
            if self.run_key is None:
                self._order |= {r if isinstance(r, str) else r.rollout_id: None for r in rollouts}
            self.assembler.opened(rollouts)
            self.follow_up()

    def resume(self, run_key: str | None, waiting: Sequence[str]) -> None:
        """Continue with the reward that the run trains on; ``waiting`` rollouts, drawn earlier, may decide it."""
        self.run_key = self.run_key or run_key
        self._order = {} if self.run_key else dict.fromkeys(waiting)

    async def cancel(self, rollout_ids: Sequence[str]) -> None:
        """Cancel the unfinished ones of these rollouts in the store."""
        for rollout_id in rollout_ids:
            try:
                rollout = await self._store.get_rollout_by_id(rollout_id)
                if rollout is not None and rollout.status not in FINISHED:
                    await self._store.update_rollout(rollout_id, status="cancelled")
            except Exception as error:  # it completes and counts as late: this wastes engine time and loses no data
                logger.warning("Rollout %s could not be cancelled in the store: %s", rollout_id, error)

    # -- calls of the follower ----------------------------------------------------------------------------------------

    async def read_if_finished(self, rollout_id: str) -> None:
        """Read a rollout that may have ended."""
        with self.changed:
            self.follower.pending_reads.discard(rollout_id)
            if rollout_id in self._reading:
                self._reading[rollout_id] = True
                return
            done = self.assembler.has_ended(rollout_id)
            if done:
                self.follower.table.read(rollout_id, ended=False)
            else:
                self._reading[rollout_id] = False
        while not done:
            member = await self.follower.with_retries(lambda: self.read(rollout_id))
            done = self._add(rollout_id, member)
        await self.follower.release_due()

    def in_flight(self) -> list[str] | None:
        """The rollouts to poll the store about; ``None`` when none was announced."""
        ids = self.assembler.ledger.open_ids()
        return ids if ids or self.announced else None

    def store_restarted(self) -> None:
        logger.warning("The store was restarted; %d rollouts in flight are lost.", self.assembler.ledger.counts().open)
        self.assembler.lose("store_restarted")
        self.producer.store_restarted()
        self.report_lost_groups()

    def time_passed(self) -> None:
        with self.changed:
            self._choose_reward_name()
            late = self.assembler.late()
            for group in late:
                self._finalized(group)
            self.follow_up()
        for group in late:
            self._report(None, group)
        self.producer.time_passed()

    def failed(self, error: BaseException) -> None:
        with self.changed:
            self.failure = self.failure or error  # the first failure is reported
            self.changed.notify_all()
        logger.debug("The data source failed.", exc_info=error)
        self.report_lost_groups()

    def report_lost_groups(self) -> None:
        """Tell the callers that wait for groups that these are lost."""
        for group_id, on_end in [*self.on_end.items()]:
            on_end(group_id, None)

    def _add(self, rollout_id: str, member: MemberResult | None) -> bool:
        """Add a rollout that was read to its group; ``False`` when it has to be read again."""
        added = None
        with self.changed:  # one step: a saved state never has the rollout in two places
            if member is None and self._reading[rollout_id]:
                self._reading[rollout_id] = False
                return False
            names = [*member.rewards] if member is not None and member.ok else []
            if self.run_key is None and names not in ([], [UNNAMED]):
                self._waiting[rollout_id] = names[0]
                self._name_awaited_since = min(self._name_awaited_since, time.monotonic())
                self._choose_reward_name()
                self._learn_order()
                return True  # it is read again once the name is known
            del self._reading[rollout_id]
            self.follower.table.read(rollout_id, ended=member is not None)
            if member is not None:
                size = member.group_size or (self._default_size if member.mode == "train" else 1)
                added = self.assembler.add(member, default_size=size)
                if added is not None and added[1] is not None:
                    self._finalized(added[1])
                self.follow_up()
            self._choose_reward_name()
            self._learn_order()
        if added is not None:
            self._report(*added)
        return True

    def _learn_order(self) -> None:
        """Learn the order of rollouts that another process enqueues, while they wait for their reward's name."""

        async def ask() -> None:
            stored = await self.follower.with_retries(self._store.query_rollouts)
            with self.changed:
                ordered = [rollout.rollout_id for rollout in sorted(stored, key=attrgetter("start_time"))]
                self._order = dict.fromkeys(sorted(self._waiting.keys() - {*ordered}) + ordered)
                self._unread_elsewhere = frozenset(name for name in ordered if not self.assembler.has_ended(name))
                self._choose_reward_name()

        if self._waiting and self.follower.has_feed and not self.announced:
            self.follower.submit(ask)

    def _choose_reward_name(self) -> None:
        """Once the first of the run's rollouts with a named reward has ended, train on its first name: the order in
        which rollouts end decides nothing."""
        is_open, ordered = self.assembler.ledger.is_open, self.announced or self.follower.has_feed
        while (first := next(iter(self._order), None)) and first not in self._waiting:
            if is_open(first) or first in self._unread_elsewhere:
                break
            del self._order[first]
        if self.run_key is not None or not self._waiting:
            return
        ended = [name for name in self._order if name in self._waiting] if ordered else [*self._waiting]
        waited_s = time.monotonic() - self._name_awaited_since
        if ended and (not ordered or ended[0] == first or waited_s > self._patience_s):
            self.run_key = self._waiting[ended[0]]
            self._order.clear()
            for rollout_id in self._waiting:
                del self._reading[rollout_id]
                self.follower.pending_reads.add(rollout_id)
                self.follower.submit(self.read_if_finished, rollout_id)
            self._waiting.clear()

    def _finalized(self, group: GroupResult) -> None:
        self.producer.finalized(group)
        self.changed.notify_all()

    def _report(self, member: MemberResult | None, group: GroupResult | None) -> None:
        """Call the listeners; outside of the lock."""
        if member is not None and member.failure == EngineProtocolError.__name__:
            self._false_answers[engine := member.failure_message.partition(" ")[0]] += 1
            if self._false_answers[engine] == 2:
                text = "A second rollout failed by an engine's answer that cannot be right; further ones are counted"
                logger.warning("%s as %s/%s: %s", text, FAILED, member.failure, member.failure_message)
        if self.on_member is not None:
            stragglers = [each for each in group.members if each.straggler] if group is not None else []
            for each in [member, *stragglers] if member is not None else stragglers:
                self.on_member(each)
        if group is not None and self.on_group is not None:
            self.on_group(group)
        if group is not None and (on_end := self.on_end.pop(group.group_id, None)) is not None:
            on_end(group.group_id, group)

    async def _enqueue(self, requests: list[EnqueueRolloutRequest]) -> None:
        """Enqueue retries, and members that were held back, under their groups."""
        self.opened(await self.follower.with_retries(lambda: self._store.enqueue_many_rollouts(requests)))
