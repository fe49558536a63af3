"""``AGLDataSource``: finished rollouts of a ``LightningStore`` as groups of Samples, for slime's RolloutManager or any
trainer.

A background thread with its own event loop learns which rollouts have ended, reads and converts them, and puts settled
groups into a queue that ``get_samples`` takes from. A ``BridgeStore`` tells it the moment a rollout ends, a
``RemoteStore`` follows the feed of the process that serves it; other stores are asked about the rollouts that are known
to be in flight and, where nobody announces them, looked through for new ones.

Built by slime from ``args`` alone, it connects to what ``agl_slime.slime.args`` describes; where that gives it tasks,
it also enqueues them, as many as are asked for.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from agl_slime.datasource.events import CompletionFeed
from agl_slime.datasource.follow import FollowProgress
from agl_slime.datasource.read import collect
from agl_slime.datasource.release import Releaser
from agl_slime.datasource.state import DataSourceState, load_state, not_a_state, save_state
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.groups.assembler import GroupFilter
from agl_slime.groups.ledger import RolloutLedger
from agl_slime.groups.policy import GroupPolicy, MinimumViableGroup
from agl_slime.groups.results import GroupResult, MemberResult, Outcome
from agl_slime.groups.settler import GroupSettler
from agl_slime.support.agl import EnqueueRolloutRequest, LightningStore, Rollout
from agl_slime.types import DataSource, Sample

if TYPE_CHECKING:  # loaded only when slime builds the data source
    from agl_slime.slime.connection import Connection
    from agl_slime.slime.demand import Demand

logger = logging.getLogger(__name__)

MemberListener = Callable[[MemberResult], None]
GroupListener = Callable[[GroupResult], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSourceSettings:
    """``get_timeout_s``: longest wait of ``get_samples`` before it says that nothing came. ``poll_interval_s``: pause
    between looks at a store that does not tell of finished rollouts; a look never takes more than a tenth of the time.
    ``policy``: when a group is fit to train on, and what to do about members that failed or are late. ``group_filter``:
    which of those groups are not worth it, such as ``groups.filters.zero_variance``. ``max_staleness``: most versions
    that tokens may be behind the policy, when their rollout ends and as long as their group waits; ``None`` is any
    number. ``blocking``: without it ``get_samples`` returns at once with what is ready, perhaps nothing. ``release``:
    tell the store which rollouts need not be kept any more; off for a second reader of the same store.
    """

    get_timeout_s: float = 600.0
    blocking: bool = True
    release: bool = True
    poll_interval_s: float = 0.1
    policy: GroupPolicy = field(default_factory=MinimumViableGroup)
    group_filter: GroupFilter | None = None
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        if self.max_staleness is not None and self.max_staleness < 0:
            raise ConfigError(f"max_staleness must be 0 or more versions, or None, got {self.max_staleness}")
        if not self.get_timeout_s > 0:
            raise ConfigError(f"get_timeout_s must be positive, got {self.get_timeout_s}")
        if not self.poll_interval_s > 0:
            raise ConfigError(f"poll_interval_s must be positive, got {self.poll_interval_s}")


class AGLDataSource(DataSource):
    """Groups of Samples from Agent Lightning rollouts.

    slime builds it as ``AGLDataSource(args)``; a program as ``AGLDataSource(store=…, tokenizer=…, args=…,
    n_samples_per_prompt=…)``. ``stop`` ends its thread.

    Rollouts are grouped by ``metadata["group_id"]``. A group that was announced with ``expect`` has the announced size,
    any other ``n_samples_per_prompt``; with one sample per prompt a rollout without a group id is a group of its own.
    ``metadata["instance_id"]`` names the task that a group is one try at; the ``ledger`` keeps account of instances, on
    disk when it is a ``PersistentLedger``.
    """

    def __init__(
        self,
        args: Any = None,
        *,
        store: LightningStore | None = None,
        tokenizer: Any = None,
        n_samples_per_prompt: int | None = None,
        settings: DataSourceSettings | None = None,
        ledger: RolloutLedger | None = None,
        on_member: MemberListener | None = None,
        on_group: GroupListener | None = None,
    ) -> None:
        if store is None and args is None:
            raise ConfigError("AGLDataSource needs a store: pass store=… (an Agent Lightning LightningStore)")
        self.args = args
        self.n_samples_per_prompt = n_samples_per_prompt or getattr(args, "n_samples_per_prompt", None) or 1
        self._connection = _connect(args) if store is None else None
        if self._connection is not None:
            store, tokenizer = self._connection.store, tokenizer or self._connection.tokenizer()
            settings = settings or self._connection.data_source_settings()
        self.settings = settings or DataSourceSettings()
        self._groups = GroupSettler(
            policy=self.settings.policy,
            group_filter=self.settings.group_filter,
            max_staleness=self.settings.max_staleness,
            ledger=ledger,
        )
        self.ledger: RolloutLedger = self._groups.ledger
        self.poll_interval_s = self.settings.poll_interval_s
        self._store: LightningStore | None = store
        self._tokenizer = tokenizer
        self._reward_key: str | None = getattr(args, "reward_key", None)
        self._on_member = on_member
        self._on_group = on_group
        self.changed = threading.Condition()
        self._failure: BaseException | None = None
        self._stopped = False
        self.announced = False
        self._collecting: set[str] = set()
        self.progress = FollowProgress()
        self._evaluations: dict[str, GroupResult | None] = {}  # validation groups that `evaluate` waits for
        self._demand = self._make_demand()
        self._releaser = Releaser(
            store if self.settings.release else None, saves=getattr(args, "save", None) is not None
        )
        self._feed = CompletionFeed(
            owner=self, store=store, group_timeout_s=getattr(self.settings.policy, "timeout_s", None)
        )
        if store is not None:
            self._feed.start()
        if self._connection is not None:
            self._connection.start()

    # -- what slime calls ---------------------------------------------------------------------------------------------

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Up to ``num_samples`` groups, oldest first; waits until that many are ready or nothing more can come.

        Fewer groups come back when no rollout is in flight any more, or at the deadline. Raises ``DataSourceError``
        when there is none at the deadline: an empty list would make slime's default rollout function spin.
        """
        if self._store is None:
            return self._groups.placeholders(num_samples, self.n_samples_per_prompt)
        self.demand(
            num_samples if self.settings.blocking else getattr(self.args, "rollout_batch_size", None) or num_samples
        )
        deadline = time.monotonic() + self.settings.get_timeout_s
        ready = self._groups.ready
        with self.changed:
            while len(ready) < num_samples and self.settings.blocking:
                self.raise_if_dead()
                if ready and not self._in_flight():
                    break
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self.changed.wait(min(remaining, 1.0))
            self.raise_if_dead()
            if not ready and num_samples > 0 and self.settings.blocking:
                counts = self.ledger.counts()
                raise DataSourceError(
                    f"no group of samples became ready within {self.settings.get_timeout_s:g} s "
                    f"({counts.open} rollouts in flight, {counts.ready} ready, ended: {_spell(counts.reasons)})"
                )
            groups = self._groups.hand_out(num_samples)
            if self._demand is not None:
                self._demand.taken(len(groups))
        return groups

    def demand(self, groups: int) -> None:
        """Have ``groups`` groups ready or under way, where this data source enqueues tasks itself; returns at once.
        Also begins to follow a remote store, or to look through one that tells of nothing: until then a saved state may
        be loaded."""
        self._feed.begin()
        if self._demand is not None:
            with self.changed:
                self._demand.raise_wanted(groups)
            self._feed.submit(self._demand.top_up())

    def evaluate(self, rollout_id: int) -> dict[str, dict[str, Any]]:
        """Run validation rollouts and wait for them: slime's evaluation data, one entry per rollout that succeeded.

        Raises ``DataSourceError`` when there are no evaluation tasks, when all rollouts failed, or at the deadline.
        """
        connection = self._connection
        if connection is None or connection.eval_tasks is None:
            raise DataSourceError(
                "there are no evaluation tasks: set agl_eval_tasks (AGL_SLIME_EVAL_TASKS) to a JSON-lines file"
            )
        self._feed.begin()
        groups = [
            (uuid.uuid4().hex, task) for task in connection.eval_tasks.next_batch(connection.settings.eval_rollouts)
        ]
        names = [group_id for group_id, _ in groups]
        with self.changed:
            self._evaluations.update(dict.fromkeys(names))
            for group_id in names:
                self._groups.assembler.announce(group_id, size=1, mode="val")
        self._feed.submit(self._enqueue_evaluation(groups))
        deadline = time.monotonic() + self.settings.get_timeout_s
        with self.changed:
            while any(self._evaluations[name] is None for name in names):
                self.raise_if_dead()
                if time.monotonic() > deadline:
                    raise DataSourceError(
                        f"evaluation {rollout_id} did not end within {self.settings.get_timeout_s:g} s"
                    )
                self.changed.wait(1.0)
            results = [self._evaluations.pop(name) for name in names]
        members = [member for group in results if group is not None for member in group.succeeded]
        if not members:
            raise DataSourceError(
                f"all {len(names)} rollouts of evaluation {rollout_id} failed: {_spell(self.ledger.counts().reasons)}"
            )
        samples = [member.samples[-1] for member in members]
        truncated = [sample.status == Sample.Status.TRUNCATED for sample in samples]
        return {"agl": {"rewards": [member.reward for member in members], "truncated": truncated, "samples": samples}}

    def metrics(self) -> dict[str, float]:
        """``agl/…``: where rollouts stand, and how many ended how since the start."""
        counts = self.ledger.counts()
        metrics: dict[str, float] = {"agl/in_flight": counts.open, "agl/groups_ready": len(self._groups.ready)}
        metrics.update({f"agl/{outcome.value}_total": count for outcome, count in counts.closed.items()})
        metrics.update(
            {f"agl/{outcome.value}/{reason}": count for (outcome, reason), count in counts.reasons.items() if reason}
        )
        return metrics

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Give groups back; they are handed out again before newer ones."""
        with self.changed:
            self._groups.ready.put_back(samples)
            self.changed.notify_all()

    def save(self, rollout_id: Any) -> None:
        """Write the groups that wait and the counters beside the checkpoint (``args.save``), under the id of the step."""
        directory = getattr(self.args, "save", None)
        if directory is not None:
            state = self.state()
            save_state(Path(directory), rollout_id, state)
            self._releaser.saved(state.waiting or [])

    def load(self, rollout_id: Any = None) -> None:
        """Read what ``save`` wrote for that step (``args.load``); does nothing when there is none, as on a fresh start."""
        directory = getattr(self.args, "load", None)
        state = load_state(Path(directory), rollout_id) if directory is not None else None
        if directory is None or state is None:
            return
        try:
            self.restore(state)
        except (KeyError, TypeError, ValueError) as error:
            raise not_a_state(Path(directory), rollout_id, error) from error

    def state(self) -> DataSourceState:
        """What another data source needs to go on from here."""
        with self.changed:
            state = self._groups.state()
            waiting = list(dict.fromkeys([*(state.waiting or []), *self._collecting]))
            return replace(
                state,
                waiting=waiting,
                ended=sorted(set(self.ledger.recent_ids()) - set(waiting)) if self._feed.looks else None,
                follow=self.progress.state(),
                demand=self._demand.state() if self._demand is not None else None,
            )

    def restore(self, state: DataSourceState) -> None:
        """Go on from ``state``; raises ``KeyError``, ``TypeError`` or ``ValueError`` when it is none, and then nothing
        has changed."""
        with self.changed:
            self._groups.restore(state)
            if state.follow is not None:
                self.progress.restore(state.follow)
            if self._demand is not None and state.demand is not None:
                self._demand.restore(state.demand)
                if not hasattr(self._store, "follow_finished"):
                    self._demand.restart()  # the store was in the process that saved
            self.changed.notify_all()
        for rollout_id in state.waiting or []:
            self.notify(rollout_id)

    def __len__(self) -> int:
        """Number of tasks in an epoch where this data source has a file of them, from which slime computes
        ``--num-epoch``; else the groups that are ready."""
        epoch = self._connection.epoch_size if self._connection is not None else None
        return len(self._groups.ready) if epoch is None else epoch

    # -- what the loop calls ------------------------------------------------------------------------------------------

    def expect(self, group_id: str, *, size: int, mode: str = "train") -> None:
        """Announce a group before its rollouts are enqueued: its size and mode, so that failures settle it too."""
        with self.changed:
            self.announced = True
            self._groups.assembler.announce(group_id, size=size, mode=mode)

    def opened(self, rollouts: Sequence[Rollout | str]) -> None:
        """These rollouts were enqueued: they are in flight in the ledger, and are asked about if the store does not
        tell of their end. A group whose members are known as rollouts, and not by their ids alone, can be settled
        without those that are late."""
        with self.changed:
            self._groups.opened(rollouts)
            self._follow_up()

    def set_version(self, version: str | int) -> None:
        """The policy has a new weight version; groups that are too old for it are dropped. Versions that are no whole
        numbers cannot be compared."""
        with self.changed:
            outdated = self._groups.outdated
            self._groups.advance([version])
            self._follow_up(dropped=self._groups.outdated > outdated)
            self.changed.notify_all()

    def abandon(self, rollout_ids: Sequence[str], *, group_ids: Iterable[str] = (), reason: str) -> None:
        """These will not end any more, or nobody waits for them: cancelled in the ledger for ``reason``, their groups
        forgotten, and late reports of them ignored."""
        with self.changed:
            self._groups.abandon(rollout_ids, group_ids=group_ids, reason=reason)
            self.changed.notify_all()

    def listen(self, *, on_member: MemberListener | None = None, on_group: GroupListener | None = None) -> None:
        """Call these for each rollout that has ended and each group that has settled from now on; on the data source's
        thread, so they must be quick."""
        self._on_member = on_member
        self._on_group = on_group

    def notify(self, rollout_id: str) -> None:
        """A rollout may have ended: look at it now. From any thread."""
        self._feed.push(rollout_id)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; waiting calls raise. Safe to call twice."""
        with self.changed:
            if self._stopped:
                return
            self._stopped = True
            self.changed.notify_all()
        if self._connection is not None:
            self._connection.stop()
        if self._store is not None:
            self._feed.stop(timeout_s)

    def __enter__(self) -> AGLDataSource:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    # -- on the background thread -------------------------------------------------------------------------------------

    async def take(self, rollout_id: str) -> None:
        """Read, convert and settle one rollout that may have ended."""
        if rollout_id in self._collecting or self._groups.assembler.holds(rollout_id):
            return
        self._collecting.add(rollout_id)
        assert self._store is not None
        try:
            member = await collect(
                self._store,
                rollout_id,
                tokenizer=self._tokenizer,
                reward_key=self._reward_key,
                convert_validation=self._connection is not None,
            )
        finally:
            self._collecting.discard(rollout_id)
        if member is not None:
            self._settle(member)
            await self._releaser.read(rollout_id)

    async def look_at_groups(self) -> None:
        """Settle the groups that have waited long enough."""
        with self.changed:
            late = self._groups.late()
            self._follow_up()
            self.changed.notify_all()
        for group in late:
            self._tell(None, group)

    def _settle(self, member: MemberResult) -> None:
        default_size = member.group_size or (self.n_samples_per_prompt if member.mode == "train" else 1)
        with self.changed:
            self.progress.settle(member.rollout_id)
            outdated = self._groups.outdated
            settled = self._groups.settle(member, default_size=default_size)
            self._follow_up(dropped=self._groups.outdated > outdated)  # it may show a newer version
            if settled is not None and (group := settled[1]) is not None and group.group_id in self._evaluations:
                self._evaluations[group.group_id] = group
            self.changed.notify_all()
        if settled is not None:
            self._tell(*settled)

    def _tell(self, member: MemberResult | None, group: GroupResult | None) -> None:
        """What has ended, to whoever listens; outside of the lock."""
        if group is not None and group.mode == "train" and self._demand is not None:
            self._demand.settled(group)
            if not group.ready:
                self._feed.submit(self._demand.top_up())
        if self._on_member is not None:
            if member is not None:
                self._on_member(member)
            for other in group.members if group is not None else ():
                if other.cut_off:
                    self._on_member(other)
        if group is not None and self._on_group is not None:
            self._on_group(group)

    def _follow_up(self, *, dropped: bool = False) -> None:
        """Have done in the store what the groups ask for; ``dropped``: ready groups are gone and may be replaced."""
        if unwanted := self._groups.take_unwanted():
            self._feed.submit(self._cancel(unwanted))
        if retries := self._groups.assembler.take_retries():
            self._feed.submit(self._run_again([member.request for member in retries if member.request is not None]))
        if dropped and self._demand is not None:
            self._feed.submit(self._demand.top_up())

    async def _cancel(self, rollout_ids: Sequence[str]) -> None:
        assert self._store is not None
        for rollout_id in rollout_ids:
            try:
                rollout = await self._store.get_rollout_by_id(rollout_id)
                if rollout is not None and rollout.status not in ("succeeded", "failed", "cancelled"):
                    await self._store.update_rollout(rollout_id, status="cancelled")
            except (
                Exception
            ) as error:  # it runs to its end and is recognised as late: engine time, not data, is at stake
                logger.warning("Rollout %s could not be cancelled in the store: %s", rollout_id, error)

    async def _run_again(self, requests: list[EnqueueRolloutRequest]) -> None:
        """Enqueue failed members that a policy wants to be run again, under the same group."""
        assert self._store is not None
        self.opened(await self._store.enqueue_many_rollouts(requests))
        if self._connection is not None:
            self._connection.wake_runner()

    # -- where this data source enqueues tasks itself -----------------------------------------------------------------

    def _make_demand(self) -> Demand | None:
        connection = self._connection
        if connection is None or connection.tasks is None:
            return None
        from agl_slime.slime.demand import Demand

        return Demand(
            connection=connection,
            tasks=connection.tasks,
            size=self.n_samples_per_prompt,
            announce=lambda group_id, size, mode: self.expect(group_id, size=size, mode=mode),
            opened=self.opened,
            ready=lambda: len(self._groups.ready),
        )

    async def _enqueue_evaluation(self, groups: list[tuple[str, Any]]) -> None:
        assert self._connection is not None
        self.opened(await self._connection.enqueue(groups, size=1, mode="val"))

    async def store_restarted(self) -> None:
        """What was in flight in the store's former life is lost: it is counted, and enqueued again where it came from
        here."""
        logger.warning("The store was restarted; %d rollouts in flight are lost.", self.ledger.counts().open)
        with self.changed:
            self._groups.lose("store_restarted")
            self.progress.reset()
        if self._connection is not None:
            await self._connection.forget()
        if self._demand is not None:
            self._demand.restart()
            await self._demand.top_up()

    # -- state --------------------------------------------------------------------------------------------------------

    def _in_flight(self) -> bool:
        # Without announcements nobody knows what is still to come: wait for the deadline.
        return (
            self._connection is not None
            or not self.announced
            or self.ledger.counts().open > 0
            or len(self._groups.assembler) > 0
        )

    def raise_if_dead(self) -> None:
        """Raise ``DataSourceError`` when the thread has ended."""
        if self._stopped:
            raise DataSourceError("the data source was stopped")
        if self._failure is not None:
            raise DataSourceError(f"the data source's thread ended: {self._failure}") from self._failure
        if self._connection is not None:
            self._connection.raise_if_dead()

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self._failure = error
            self.changed.notify_all()


def _connect(args: Any) -> Connection | None:
    from agl_slime.slime.connection import connect

    return connect(args)


def _spell(reasons: dict[tuple[Outcome, str], int]) -> str:
    return (
        ", ".join(
            f"{count} {outcome.value}{f' ({reason})' if reason else ''}" for (outcome, reason), count in reasons.items()
        )
        or "none"
    )
