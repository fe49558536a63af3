"""``AGLDataSource``: finished rollouts of a ``LightningStore`` as groups of Samples, for slime's RolloutManager or any trainer.

A background thread with its own event loop learns which rollouts have ended, reads and converts them, and puts settled groups into a queue that
``get_samples`` takes from. A ``BridgeStore`` tells it the moment a rollout ends, a ``RemoteStore`` follows the feed of the process that serves it;
other stores are asked about the rollouts that are known to be in flight and, where nobody announces them, looked through for new ones.

Built by slime from ``args`` alone, it connects to what ``agl_slime.slime.settings`` describes; where that gives it tasks, it also enqueues them, as
many as are asked for.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from agl_slime._agl import LightningStore, Rollout
from agl_slime.collector import collect
from agl_slime.completion_feed import CompletionFeed
from agl_slime.datasource_state import DataSourceState, load_state, not_a_state, save_state
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.follow import FollowProgress
from agl_slime.groups.assembler import GroupAssembler, GroupFilter
from agl_slime.groups.ledger import Ledger, RolloutLedger
from agl_slime.groups.outcome import CUT_OFF, GroupResult, MemberResult, Outcome
from agl_slime.groups.policy import GroupPolicy, MinimumViableGroup
from agl_slime.groups.staleness import PolicyVersion, versions_of
from agl_slime.ready import ReadyGroup, ReadyGroups
from agl_slime.release import Releaser
from agl_slime.types import DataSource, Sample, set_rollout_id

if TYPE_CHECKING:  # loaded only when slime builds the data source
    from agl_slime.slime.connection import Connection
    from agl_slime.slime.demand import Demand

logger = logging.getLogger(__name__)

MemberListener = Callable[[MemberResult], None]
GroupListener = Callable[[GroupResult], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSourceSettings:
    """``get_timeout_s``: longest wait of ``get_samples`` before it says that nothing came. ``poll_interval_s``: pause between looks at a store that
    does not tell of finished rollouts; a look never takes more than a tenth of the time. ``policy``: when a group is fit to train on, and what to do
    about members that failed or are late. ``group_filter``: which of those groups are not worth it, such as ``groups.filters.zero_variance``.
    ``max_staleness``: most versions that tokens may be behind the policy, when their rollout ends and as long as their group waits; ``None`` is any
    number. ``blocking``: without it ``get_samples`` returns at once with what is ready, perhaps nothing. ``release``: tell the store which rollouts
    need not be kept any more; off for a second reader of the same store.
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

    slime builds it as ``AGLDataSource(args)``; a program as ``AGLDataSource(store=…, tokenizer=…, args=…, n_samples_per_prompt=…)``. ``stop`` ends
    its thread.

    Rollouts are grouped by ``metadata["group_id"]``. A group that was announced with ``expect`` has the announced size, any other
    ``n_samples_per_prompt``; with one sample per prompt a rollout without a group id is a group of its own. ``metadata["instance_id"]`` names the
    task that a group is one try at; the ``ledger`` keeps account of instances, on disk when it is a ``PersistentLedger``.
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
        self.ledger: RolloutLedger = ledger if ledger is not None else Ledger()
        self.poll_interval_s = self.settings.poll_interval_s
        self._store: LightningStore | None = store
        self._tokenizer = tokenizer
        self._reward_key: str | None = getattr(args, "reward_key", None)
        self._on_member = on_member
        self._on_group = on_group
        self._assembler = GroupAssembler(policy=self.settings.policy, group_filter=self.settings.group_filter)
        self._policy_version = PolicyVersion(max_staleness=self.settings.max_staleness)
        self._ready = ReadyGroups()
        self.changed = threading.Condition()
        self._next_index = 0
        self._next_group_index = 0
        self._next_rollout_number = 0
        self._failure: BaseException | None = None
        self._stopped = False
        self.announced = False
        self._collecting: set[str] = set()
        self.progress = FollowProgress()
        self._evaluations: dict[str, GroupResult | None] = {}  # validation groups that `evaluate` waits for
        self._demand = self._make_demand()
        self._releaser = Releaser(store if self.settings.release else None, saves=getattr(args, "save", None) is not None)
        self._feed = CompletionFeed(owner=self, store=store, group_timeout_s=getattr(self.settings.policy, "timeout_s", None))
        if store is not None:
            self._feed.start()
        if self._connection is not None:
            self._connection.start()

    # -- what slime calls --------------------------------------------------------------------------------------------------------------------

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Up to ``num_samples`` groups, oldest first; waits until that many are ready or nothing more can come.

        Fewer groups come back when no rollout is in flight any more, or at the deadline. Raises ``DataSourceError`` when there is none at the
        deadline: an empty list would make slime's default rollout function spin.
        """
        if self._store is None:
            first, self._next_group_index = self._next_group_index, self._next_group_index + num_samples
            return _placeholder_groups(first, num_samples, self.n_samples_per_prompt)
        self.demand(num_samples if self.settings.blocking else getattr(self.args, "rollout_batch_size", None) or num_samples)
        deadline = time.monotonic() + self.settings.get_timeout_s
        with self.changed:
            while len(self._ready) < num_samples and self.settings.blocking:
                self.raise_if_dead()
                if self._ready and not self._in_flight():
                    break
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self.changed.wait(min(remaining, 1.0))
            self.raise_if_dead()
            if not self._ready and num_samples > 0 and self.settings.blocking:
                counts = self.ledger.counts()
                raise DataSourceError(
                    f"no group of samples became ready within {self.settings.get_timeout_s:g} s "
                    f"({counts.open} rollouts in flight, {counts.ready} ready, ended: {_spell(counts.reasons)})"
                )
            groups = self._ready.take(num_samples)
            with self.ledger.batch():
                for group in groups:
                    if self.ledger.close_many(group.rollout_ids, Outcome.TRAINED):  # not when it was given back and comes again
                        self._finish_instance(group.instance_id)
            if self._demand is not None:
                self._demand.taken(len(groups))
        return [group.samples for group in groups]

    def demand(self, groups: int) -> None:
        """Have ``groups`` groups ready or under way, where this data source enqueues tasks itself; returns at once. Also begins to follow a remote
        store, or to look through one that tells of nothing: until then a saved state may be loaded."""
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
            raise DataSourceError("there are no evaluation tasks: set agl_eval_tasks (AGL_SLIME_EVAL_TASKS) to a JSON-lines file")
        self._feed.begin()
        groups = [(uuid.uuid4().hex, task) for task in connection.eval_tasks.next_batch(connection.settings.eval_rollouts)]
        names = [group_id for group_id, _ in groups]
        with self.changed:
            self._evaluations.update(dict.fromkeys(names))
            for group_id in names:
                self._assembler.announce(group_id, size=1, mode="val")
        self._feed.submit(self._enqueue_evaluation(groups))
        deadline = time.monotonic() + self.settings.get_timeout_s
        with self.changed:
            while any(self._evaluations[name] is None for name in names):
                self.raise_if_dead()
                if time.monotonic() > deadline:
                    raise DataSourceError(f"evaluation {rollout_id} did not end within {self.settings.get_timeout_s:g} s")
                self.changed.wait(1.0)
            results = [self._evaluations.pop(name) for name in names]
        members = [member for group in results if group is not None for member in group.succeeded]
        if not members:
            raise DataSourceError(f"all {len(names)} rollouts of evaluation {rollout_id} failed: {_spell(self.ledger.counts().reasons)}")
        samples = [member.samples[-1] for member in members]
        truncated = [sample.status == Sample.Status.TRUNCATED for sample in samples]
        return {"agl": {"rewards": [member.reward for member in members], "truncated": truncated, "samples": samples}}

    def metrics(self) -> dict[str, float]:
        """``agl/…``: where rollouts stand, and how many ended how since the start."""
        counts = self.ledger.counts()
        metrics: dict[str, float] = {"agl/in_flight": counts.open, "agl/groups_ready": len(self._ready)}
        metrics.update({f"agl/{outcome.value}_total": count for outcome, count in counts.closed.items()})
        metrics.update({f"agl/{outcome.value}/{reason}": count for (outcome, reason), count in counts.reasons.items() if reason})
        return metrics

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Give groups back; they are handed out again before newer ones."""
        with self.changed:
            self._ready.put_back(samples)
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
            waiting = [*dict.fromkeys([*(member.rollout_id for member in self._assembler.members_waiting()), *self._collecting])]
            return DataSourceState(
                groups=[[sample.to_dict() for sample in group.samples] for group in self._ready.groups],
                index=self._next_index,
                group_index=self._next_group_index,
                rollout_number=self._next_rollout_number,
                members=[group.rollout_ids for group in self._ready.groups],
                instances=[group.instance_id for group in self._ready.groups],
                waiting=waiting,
                ended=sorted(set(self.ledger.recent_ids()) - set(waiting)) if self._feed.looks else None,
                follow=self.progress.state(),
                demand=self._demand.state() if self._demand is not None else None,
                closed=self._closed_counts() if isinstance(self.ledger, Ledger) else None,
                early=self._assembler.early,
                version=self._policy_version.newest,
            )

    def restore(self, state: DataSourceState) -> None:
        """Go on from ``state``; raises ``KeyError``, ``TypeError`` or ``ValueError`` when it is none, and then nothing has changed."""
        n = len(state.groups)
        groups = [
            ReadyGroup([Sample.from_dict(sample) for sample in samples], members, instance_id)
            for samples, members, instance_id in zip(state.groups, state.members or [[]] * n, state.instances or [None] * n, strict=True)
        ]
        with self.changed:
            self.ledger.remember(state.ended or [])
            if isinstance(self.ledger, Ledger):
                self.ledger.carry_over([(Outcome(outcome), reason, n) for outcome, reason, n in state.closed or []])
            with self.ledger.batch():
                for group in groups:
                    self._ready.put(group)
                    self.ledger.open_many([(rollout_id, group.instance_id) for rollout_id in group.rollout_ids])
                    self.ledger.ready_many(group.rollout_ids)
            self._policy_version.advance(state.version)
            self._assembler.remember_early(state.early or [])
            self._next_index = max(self._next_index, state.index)
            self._next_group_index = max(self._next_group_index, state.group_index)
            self._next_rollout_number = max(self._next_rollout_number, state.rollout_number)
            if state.follow is not None:
                self.progress.restore(state.follow)
            if self._demand is not None and state.demand is not None:
                self._demand.restore(state.demand)
                if not hasattr(self._store, "follow_finished"):
                    self._demand.restart()  # the store was in the process that saved
            self.changed.notify_all()
        for rollout_id in state.waiting or []:
            self.notify(rollout_id)

    def _closed_counts(self) -> list[list[Any]]:
        closed = Counter(self.ledger.counts().reasons)
        for member in self._assembler.members_waiting():  # which are read, and counted, once more when the state is loaded
            if not member.ok:
                closed[member.outcome_if_failed, member.failure or ""] -= 1
            elif member.mode != "train":
                closed[Outcome.VALIDATED, ""] -= 1
        return [[outcome.value, reason, n] for (outcome, reason), n in closed.items() if n]

    def __len__(self) -> int:
        """Number of tasks in an epoch where this data source has a file of them, from which slime computes ``--num-epoch``; else the groups that are
        ready."""
        epoch = self._connection.epoch_size if self._connection is not None else None
        return len(self._ready) if epoch is None else epoch

    # -- what the loop calls -----------------------------------------------------------------------------------------------------------------

    def expect(self, group_id: str, *, size: int, mode: str = "train") -> None:
        """Announce a group before its rollouts are enqueued: its size and mode, so that failures settle it too."""
        with self.changed:
            self.announced = True
            self._assembler.announce(group_id, size=size, mode=mode)

    def opened(self, rollouts: Sequence[Rollout | str]) -> None:
        """These rollouts were enqueued: they are in flight in the ledger, and are asked about if the store does not tell of their end. A group whose
        members are known as rollouts, and not by their ids alone, can be settled without those that are late."""
        unwanted: list[str] = []
        with self.changed:
            self.ledger.open_many([_name_and_instance(rollout) for rollout in rollouts])
            for rollout in rollouts:
                group_id = None if isinstance(rollout, str) else (rollout.metadata or {}).get("group_id")
                if group_id is not None and not isinstance(rollout, str) and not self._assembler.enlist(str(group_id), rollout.rollout_id):
                    unwanted.append(rollout.rollout_id)
            self._close_unwanted(unwanted, "group_settled")

    def set_version(self, version: str | int) -> None:
        """The policy has a new weight version; groups that are too old for it are dropped. Versions that are no whole numbers cannot be compared."""
        with self.changed:
            self._advance([version])
            self.changed.notify_all()

    def abandon(self, rollout_ids: Sequence[str], *, group_ids: Iterable[str] = (), reason: str) -> None:
        """These will not end any more, or nobody waits for them: cancelled in the ledger for ``reason``, their groups forgotten, and late reports of
        them ignored."""
        with self.changed:
            self._assembler.forget(group_ids)
            with self.ledger.batch():
                self.ledger.close_many([rollout_id for rollout_id in rollout_ids if self.ledger.is_open(rollout_id)], Outcome.CANCELLED, reason)
            self.changed.notify_all()

    def listen(self, *, on_member: MemberListener | None = None, on_group: GroupListener | None = None) -> None:
        """Call these for each rollout that has ended and each group that has settled from now on; on the data source's thread, so they must be
        quick."""
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

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    # -- on the background thread ----------------------------------------------------------------------------------------------------------------

    async def take(self, rollout_id: str) -> None:
        """Read, convert and settle one rollout that may have ended."""
        if rollout_id in self._collecting:
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
            await self._run_again()

    async def look_at_groups(self) -> None:
        """Settle the groups that have waited long enough."""
        with self.changed:
            late = self._assembler.late()
            for group in late:
                self._settle_group(group)
            self.changed.notify_all()
        for group in late:
            self._tell(None, group)
        await self._run_again()

    def _settle(self, member: MemberResult) -> None:
        with self.changed, self.ledger.batch():
            self.ledger.open(member.rollout_id, instance_id=member.instance_id)  # a rollout that nobody announced is opened by its end
            self.progress.settle(member.rollout_id)
            if not self.ledger.is_open(member.rollout_id):
                return  # reported twice
            if self._assembler.settled_early(member.group_id):
                self.ledger.close(member.rollout_id, Outcome.CANCELLED, "group_settled")
                return
            member = self._check_age(member)
            default_size = member.group_size or (self.n_samples_per_prompt if member.mode == "train" else 1)
            group = self._assembler.add(member, default_size=default_size)
            if not member.ok:
                self.ledger.close(member.rollout_id, member.outcome_if_failed, member.failure or "")
            elif member.mode != "train":
                self.ledger.close(member.rollout_id, Outcome.VALIDATED)
            if group is not None:
                self._settle_group(group)
            self.changed.notify_all()
        self._tell(member, group)

    def _check_age(self, member: MemberResult) -> MemberResult:
        """The member, as a failure when it was sampled by weights that are too old."""
        if not member.ok or member.mode != "train":
            return member
        self._advance(versions_of(member.samples))
        if not self._policy_version.too_old(member.samples):
            return member
        message = f"{self._policy_version.lag(member.samples)} versions behind the policy, {self.settings.max_staleness} are allowed"
        return replace(member, failure="stale", failure_message=message, outcome_if_failed=Outcome.STALE, samples=())

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

    def _settle_group(self, group: GroupResult) -> None:
        if group.mode != "train":
            if group.group_id in self._evaluations:
                self._evaluations[group.group_id] = group
            return
        for reason in CUT_OFF:
            self._close_unwanted([member.rollout_id for member in group.members if member.failure == reason], reason)
        if not group.ready:
            self.ledger.close_many([member.rollout_id for member in group.succeeded], Outcome.FILTERED, group.code)
            self._finish_instance(group.instance_id)
            return
        samples: list[Sample] = []
        for member in group.succeeded:
            for sample in member.samples:
                sample.group_index = self._next_group_index
                sample.index = self._next_index
                if group.instance_id is not None:
                    sample.metadata["instance_id"] = group.instance_id
                set_rollout_id(sample, self._next_rollout_number)
                self._next_index += 1
                samples.append(sample)
            self._next_rollout_number += 1
        rollout_ids = [member.rollout_id for member in group.succeeded]
        self.ledger.ready_many(rollout_ids)
        self._next_group_index += 1
        self._ready.put(ReadyGroup(samples, rollout_ids, group.instance_id))

    def _finish_instance(self, instance_id: str | None) -> None:
        if instance_id is not None:
            self.ledger.finish_instance(instance_id)

    def _close_unwanted(self, rollout_ids: list[str], reason: str) -> None:
        """Rollouts that nobody waits for: cancelled, in the ledger at once and in the store soon."""
        if rollout_ids:
            self.ledger.close_many(rollout_ids, Outcome.CANCELLED, reason)
            self._feed.submit(self._cancel(rollout_ids))

    async def _cancel(self, rollout_ids: Sequence[str]) -> None:
        assert self._store is not None
        for rollout_id in rollout_ids:
            try:
                rollout = await self._store.get_rollout_by_id(rollout_id)
                if rollout is not None and rollout.status not in ("succeeded", "failed", "cancelled"):
                    await self._store.update_rollout(rollout_id, status="cancelled")
            except Exception as error:  # it runs to its end and is recognised as late: engine time, not data, is at stake
                logger.warning("Rollout %s could not be cancelled in the store: %s", rollout_id, error)

    async def _run_again(self) -> None:
        """Enqueue the failed members that a policy wants to be run again, under the same group."""
        with self.changed:
            retries = self._assembler.take_retries()
        if not retries:
            return
        assert self._store is not None
        self.opened(await self._store.enqueue_many_rollouts([member.request for member in retries if member.request is not None]))
        if self._connection is not None:
            self._connection.wake_runner()

    def _advance(self, versions: Iterable[str | int]) -> None:
        """The policy has one of these versions, at least. Groups that are too old for it are not handed out any more."""
        news = [self._policy_version.advance(version) for version in versions]
        if not any(news):
            return
        stale = self._ready.remove(self._policy_version.too_old)
        for group in stale:
            self.ledger.close_many(group.rollout_ids, Outcome.STALE, "waited_too_long")
            self._finish_instance(group.instance_id)
        if stale and self._demand is not None:
            self._feed.submit(self._demand.top_up())

    # -- where this data source enqueues tasks itself ----------------------------------------------------------------------------------------------

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
            ready=lambda: len(self._ready),
        )

    async def _enqueue_evaluation(self, groups: list[tuple[str, Any]]) -> None:
        assert self._connection is not None
        self.opened(await self._connection.enqueue(groups, size=1, mode="val"))

    async def store_restarted(self) -> None:
        """What was in flight in the store's former life is lost: it is counted, and enqueued again where it came from here."""
        logger.warning("The store was restarted; %d rollouts in flight are lost.", self.ledger.counts().open)
        with self.changed:
            lost = {member.rollout_id for member in self._assembler.members_waiting()} | set(self.ledger.open_ids())
            for rollout_id in lost:
                self.ledger.close(rollout_id, Outcome.CANCELLED, "store_restarted")
            self._assembler.clear()
            self.progress.reset()
        if self._connection is not None:
            await self._connection.forget()
        if self._demand is not None:
            self._demand.restart()
            await self._demand.top_up()

    # -- state -----------------------------------------------------------------------------------------------------------------------------------

    def _in_flight(self) -> bool:
        # Without announcements nobody knows what is still to come: wait for the deadline.
        return self._connection is not None or not self.announced or self.ledger.counts().open > 0 or len(self._assembler) > 0

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


def _placeholder_groups(first: int, n: int, size: int) -> list[list[Sample]]:
    """Groups of unsampled (PENDING) samples: what slime's own data source gives without a data set."""
    return [[Sample(group_index=group, index=group * size + member) for member in range(size)] for group in range(first, first + n)]


def _name_and_instance(rollout: Rollout | str) -> tuple[str, str | None]:
    if isinstance(rollout, str):
        return rollout, None
    instance_id = (rollout.metadata or {}).get("instance_id")
    return rollout.rollout_id, None if instance_id is None else str(instance_id)


def _spell(reasons: dict[tuple[Outcome, str], int]) -> str:
    return ", ".join(f"{count} {outcome.value}{f' ({reason})' if reason else ''}" for (outcome, reason), count in reasons.items()) or "none"
