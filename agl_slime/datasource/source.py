"""``GroupSource``: finished rollouts of a ``LightningStore`` as groups of Samples.

A background thread with its own event loop learns which rollouts have ended, reads and converts them, and puts
finalized groups into a queue that ``get_samples`` takes from. slime builds the subclass ``agl_slime.AGLDataSource``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import Any

from typing_extensions import Self

from agl_slime.datasource.events import EndFollower
from agl_slime.datasource.read import collect
from agl_slime.errors import DataSourceError
from agl_slime.groups.assembler import GroupAssembler
from agl_slime.groups.ledger import Ledger
from agl_slime.groups.policy import GroupFilter, GroupPolicy, MinimumViableGroup
from agl_slime.groups.results import GroupResult, MemberResult, Outcome, group_of, rollout_of
from agl_slime.store.bridge import FINISHED
from agl_slime.support.agl import EnqueueRolloutRequest, LightningStore, Rollout
from agl_slime.support.ranges import check_ranges
from agl_slime.types import Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSourceSettings:
    """``get_timeout_s``: longest wait of ``get_samples``. ``blocking``: without it that returns at once with what is
    ready, perhaps nothing. ``release``: tell the store what need not be kept any more; off for a second reader of it.
    ``poll_interval_s``: pause between looks at a store that tells of nothing; a look takes at most a tenth of the time.
    ``policy``: when a group is fit to train on, and what to do about members that failed or are late. ``group_filter``:
    which of those groups are not worth it, such as ``zero_variance``. ``max_staleness``: most versions that tokens may
    be behind the policy, when their rollout ends and as long as their group waits; ``None`` is any number."""

    get_timeout_s: float = 600.0
    blocking: bool = True
    release: bool = True
    poll_interval_s: float = 0.1
    policy: GroupPolicy = field(default_factory=MinimumViableGroup)
    group_filter: GroupFilter | None = None
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        check_ranges(
            self,
            ("max_staleness", lambda value: value >= 0, "0 or more versions, or None"),
            ("get_timeout_s poll_interval_s", lambda value: value > 0, "above 0 seconds"),
        )


class GroupSource(EndFollower):
    """Groups of Samples from Agent Lightning rollouts. ``stop`` ends its thread.

    Rollouts are grouped by ``metadata["group_id"]``. A group that was announced with ``expect`` has the announced size,
    any other ``n_samples_per_prompt``; with one sample per prompt a rollout without a group id is a group of its own.
    ``metadata["instance_id"]`` names the task that a group is one try at; the ``ledger`` keeps account of instances.

    Args:
        store: whose rollouts; ``None`` gives placeholders, groups of samples that nobody has sampled.
        reward_key: which of several named rewards is the one to train on; by default the first.
        convert_validation: validation rollouts have samples, too.
        hold: the store outlives this process and states are saved: see ``EndTable``.
    """

    def __init__(
        self,
        *,
        store: LightningStore | None,
        tokenizer: Any = None,
        n_samples_per_prompt: int = 1,
        settings: DataSourceSettings | None = None,
        ledger: Ledger | None = None,
        reward_key: str | None = None,
        convert_validation: bool = False,
        hold: bool = False,
    ) -> None:
        self.settings = settings = settings or DataSourceSettings()
        tick_s = (getattr(settings.policy, "timeout_s", None) or 10.0) / 10
        super().__init__(
            store, hold=hold, release=settings.release, poll_interval_s=settings.poll_interval_s, tick_s=tick_s
        )
        self.n_samples_per_prompt = n_samples_per_prompt
        self._collect = partial(
            collect, self._store, tokenizer=tokenizer, reward_key=reward_key, convert_validation=convert_validation
        )
        self._on_member: Callable[[MemberResult], None] | None = None
        self._on_group: Callable[[GroupResult], None] | None = None
        self._groups = GroupAssembler(
            policy=settings.policy,
            group_filter=settings.group_filter,
            max_staleness=settings.max_staleness,
            ledger=ledger,
        )
        self.ledger = self._groups.ledger
        self._stopped = False
        self._announced = False
        self._reserved: int | None = None  # of the ready groups, the first so many may be delivered
        self._reading: set[str] = set()
        self._start()

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Up to ``num_samples`` groups, oldest first; waits until that many are ready or nothing more can come.

        Fewer groups come back when no rollout is in flight any more, or at the deadline. Raises ``DataSourceError``
        when there is none at the deadline: an empty list would make slime's default rollout function spin.
        """
        if self._store is None:
            return self._groups.placeholders(num_samples, self.n_samples_per_prompt)
        self._begin()
        timeout_s, blocking = self.settings.get_timeout_s, self.settings.blocking
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while blocking and (ready := self._deliverable()) < num_samples and (not ready or self._more_to_come()):
                self.raise_if_dead()
                if (remaining := deadline - time.monotonic()) <= 0:
                    break
                self._changed.wait(min(remaining, 1.0))
            self.raise_if_dead()
            if blocking and num_samples > 0 and not self._deliverable():
                counts = self.ledger.counts()
                raise DataSourceError(
                    f"no group of samples became ready within {timeout_s:g} s "
                    f"({counts.open} rollouts in flight, {counts.ready} ready, ended: {spell_ends(counts.reasons)})"
                )
            return self._deliver(num_samples)

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Give groups back; they are delivered again before newer ones."""
        with self._changed:
            self._groups.ready.extendleft(reversed(samples))
            if self._reserved is not None:
                self._reserved += len(samples)
            self._changed.notify_all()

    def reserve(self, rollout_ids: Sequence[str] | None) -> int:
        """``get_samples`` delivers the ready groups that these rollouts belong to, in this order, and no others, and
        does not wait for more; ``None``: any, oldest first. Returns how many of those that were reserved before have
        not been delivered."""
        with self._changed:
            left, ready = self._reserved or 0, self._groups.ready
            order = {name: place for place, name in enumerate(rollout_ids or ())}
            places = [min(order.get(rollout_of(sample) or "", len(order)) for sample in group) for group in ready]
            arranged = sorted(zip(places, ready, strict=True), key=itemgetter(0))
            ready.clear()
            ready.extend(group for _, group in arranged)
            self._reserved = None if rollout_ids is None else sum(place < len(order) for place in places)
            self._changed.notify_all()
        return left

    def ready_groups(self) -> list[GroupResult]:
        """The groups that are ready, as far as their samples tell of them."""
        with self._changed:
            return [group_of(samples) for samples in self._groups.ready]

    def reject(self, samples: Sequence[Sequence[Sample]], reason: str) -> None:
        """These groups were delivered and are not trained on (a dynamic sampling filter): counted as filtered for
        ``reason`` and not as trained."""
        with self._changed:
            self._groups.reject(samples, reason)

    def __len__(self) -> int:
        """The groups that are ready."""
        return len(self._groups.ready)

    def metrics(self) -> dict[str, float]:
        """``agl/…``: where rollouts stand, and how many ended how since the start."""
        counts = self.ledger.counts()
        metrics: dict[str, float] = {"agl/in_flight": counts.open, "agl/groups_ready": len(self._groups.ready)}
        metrics.update({f"agl/{outcome.value}_total": count for outcome, count in counts.closed.items()})
        metrics.update({f"agl/{end.value}/{reason}": n for (end, reason), n in counts.reasons.items() if reason})
        return metrics

    def expect(self, group_id: str, *, size: int, mode: str = "train") -> None:
        """Announce a group before its rollouts are enqueued: its size and mode, so that failures finalize it too."""
        with self._changed:
            self._announced = True
            self._groups.announce(group_id, size=size, mode=mode)

    def opened(self, rollouts: Sequence[Rollout | str]) -> None:
        """These rollouts were enqueued: they are in flight in the ledger, and are asked about if the store does not
        tell of their end. A group whose members are known as rollouts, and not by their ids alone, can be finalized
        without those that are late."""
        with self._changed:
            self._groups.opened(rollouts)
            self._follow_up()

    def set_version(self, version: str | int) -> None:
        """The policy has a new weight version; groups that are too old for it are dropped. Versions that are no whole
        numbers cannot be compared."""
        with self._changed:
            self._groups.advance([version])
            self._follow_up()
            self._changed.notify_all()

    def abandon(self, rollout_ids: Sequence[str], *, group_ids: Iterable[str] = (), reason: str) -> None:
        """These will not end any more, or nobody waits for them: cancelled in the ledger for ``reason``, their groups
        forgotten, and late reports of them ignored."""
        with self._changed:
            self._groups.abandon(rollout_ids, group_ids=group_ids, reason=reason)
            self._changed.notify_all()

    def listen(
        self,
        *,
        on_member: Callable[[MemberResult], None] | None = None,
        on_group: Callable[[GroupResult], None] | None = None,
    ) -> None:
        """Call these for each rollout that has ended and each group that was finalized from now on; on the data
        source's thread, so they must be quick."""
        self._on_member, self._on_group = on_member, on_group

    def notify(self, rollout_id: str) -> None:
        """A rollout may have ended: look at it now. From any thread."""
        self._submit(self._look, rollout_id)

    def raise_if_dead(self) -> None:
        """Raise ``DataSourceError`` when the thread has ended."""
        if self._stopped:
            raise DataSourceError("the data source was stopped")
        if self._failure is not None:
            raise DataSourceError(f"the data source's thread ended: {self._failure}") from self._failure

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; waiting calls raise. Safe to call twice."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._join(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def state(self, *, checkpoint: int | None = None) -> dict[str, Any]:
        """What another data source needs to go on from here, for JSON. The ledger notes the step ``checkpoint`` at the
        same moment."""
        with self._changed:
            state = {**self._groups.state(), **self._ends.state()}
            state["waiting"] = list(dict.fromkeys([*state["waiting"], *self._reading, *self._to_read]))
            # a store that tells of nothing would give again all that was dealt with
            ended = state["ended"] if self._tells or self._feeds else self.ledger.recent_ids()
            state["ended"] = sorted({*ended})
            if checkpoint is not None:
                self.ledger.checkpoint(checkpoint)
            return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; raises ``KeyError``, ``TypeError`` or ``ValueError`` when it is none, and then nothing
        has changed."""
        waiting = state.get("waiting") or []
        with self._changed:
            self._groups.restore(state)
            self.ledger.remember({*(state.get("ended") or ())} - {*waiting})
            self._ends.restore(state)
            self._to_read.update(waiting)
            self._changed.notify_all()
        for rollout_id in waiting:
            self.notify(rollout_id)

    async def _look(self, rollout_id: str) -> None:
        """Read, convert and take in one rollout that may have ended."""
        with self._changed:
            self._to_read.discard(rollout_id)
            if rollout_id in self._reading:
                return
            if known := self._groups.has_ended(rollout_id):
                self._ends.read(rollout_id, ended=False)
            else:
                self._reading.add(rollout_id)
        if not known:
            member = await self._patiently(lambda: self._collect(rollout_id))
            self._take(rollout_id, member)
        await self._release_due()

    def _take(self, rollout_id: str, member: MemberResult | None) -> None:
        taken = None
        with self._changed:  # one step, so that a saved state has the rollout in one place
            self._reading.discard(rollout_id)
            self._ends.read(rollout_id, ended=member is not None)
            if member is not None:
                size = member.group_size or (self.n_samples_per_prompt if member.mode == "train" else 1)
                taken = self._groups.add(member, default_size=size)
                if taken is not None and taken[1] is not None:
                    self._finalized(taken[1])
                    self._changed.notify_all()
                self._follow_up()
        if taken is not None:
            self._tell(*taken)

    def _time_passed(self) -> None:
        with self._changed:
            late = self._groups.late()
            for group in late:
                self._finalized(group)
                self._changed.notify_all()
            self._follow_up()
        for group in late:
            self._tell(None, group)

    def _tell(self, member: MemberResult | None, group: GroupResult | None) -> None:
        """What has ended, to whoever listens; outside of the lock."""
        if self._on_member is not None:
            stragglers = [one for one in group.members if one.straggler] if group is not None else []
            for one in [member, *stragglers] if member is not None else stragglers:
                self._on_member(one)
        if group is not None and self._on_group is not None:
            self._on_group(group)

    async def _cancel(self, rollout_ids: Sequence[str]) -> None:
        for rollout_id in rollout_ids:
            try:
                rollout = await self._store.get_rollout_by_id(rollout_id)
                if rollout is not None and rollout.status not in FINISHED:
                    await self._store.update_rollout(rollout_id, status="cancelled")
            except Exception as error:  # it runs to its end and counts as late: engine time is at stake, not data
                logger.warning("Rollout %s could not be cancelled in the store: %s", rollout_id, error)

    async def _run_again(self, requests: list[EnqueueRolloutRequest]) -> None:
        """Enqueue failed members that a policy wants to be run again, under the same group."""
        self.opened(await self._patiently(lambda: self._store.enqueue_many_rollouts(requests)))

    def _in_flight(self) -> list[str] | None:
        ids = self.ledger.open_ids()
        return ids if ids or self._announced else None

    def _deliver(self, num_samples: int) -> list[list[Sample]]:
        groups = self._groups.deliver(min(num_samples, self._deliverable()))
        if self._reserved is not None:
            self._reserved -= len(groups)
        return groups

    def _deliverable(self) -> int:
        ready = len(self._groups.ready)
        return ready if self._reserved is None else min(ready, self._reserved)

    def _finalized(self, group: GroupResult) -> None:
        """A group was finalized."""

    def _follow_up(self) -> None:
        """Have done in the store what the groups ask for."""
        if unwanted := self._groups.take_unwanted():
            self._submit(self._cancel, unwanted)
        if retries := self._groups.take_retries():
            self._submit(self._run_again, [one.request for one in retries])

    def _store_restarted(self) -> None:
        logger.warning("The store was restarted; %d rollouts in flight are lost.", self.ledger.counts().open)
        self._groups.lose("store_restarted")

    def _more_to_come(self) -> bool:
        # without announcements nobody knows what is still to come: wait for the deadline
        if self._reserved is not None:
            return False
        return not self._announced or len(self._groups) > 0 or self.ledger.counts().open > 0


def spell_ends(reasons: dict[tuple[Outcome, str], int]) -> str:
    """How many ended how, as text."""
    ends = [f"{n} {outcome.value}{f' ({reason})' if reason else ''}" for (outcome, reason), n in reasons.items()]
    return ", ".join(ends) or "none"
