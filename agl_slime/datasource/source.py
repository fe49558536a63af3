"""``GroupSource``: finished rollouts of a ``LightningStore`` as groups of Samples.

Ends (``ends``) are read and taken in (``intake``) on a thread with an event loop; the assembler makes groups of them,
and what is ready waits in its delivery for ``get_samples``. slime builds ``agl_slime.AGLDataSource``, which holds one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, Self

from agl_slime.datasource.intake import Intake, Producer
from agl_slime.datasource.read import collect
from agl_slime.errors import DataSourceError
from agl_slime.groups.assembler import GroupAssembler
from agl_slime.groups.ledger import Ledger
from agl_slime.groups.policy import GroupFilter, GroupPolicy, MinimumViableGroup
from agl_slime.groups.results import GroupResult, MemberResult, Outcome, group_of
from agl_slime.support.agl import LightningStore, Rollout
from agl_slime.support.ranges import check_ranges
from agl_slime.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSourceSettings:
    """How long ``get_samples`` waits, and which groups it delivers."""

    get_timeout_s: float = 600.0
    """Longest wait of ``get_samples``, in seconds."""
    blocking: bool = True
    """Whether ``get_samples`` waits; False returns the groups that are ready at once, perhaps none."""
    release: bool = True
    """Let the store forget rollouts once they are read; False when another process reads the same store."""
    poll_interval_s: float = 0.1
    """Seconds between polls of a store without notifications; polling takes at most a tenth of the time."""
    policy: GroupPolicy = field(default_factory=MinimumViableGroup)
    """When a group is fit to train on, and what to do about failed and late members."""
    group_filter: GroupFilter | None = None
    """Which groups fit to train on are dropped nevertheless, such as ``zero_variance``."""

    def __post_init__(self) -> None:
        check_ranges(
            self,
            ("get_timeout_s poll_interval_s", lambda value: value > 0, "above 0 seconds"),
        )


class GroupSource:
    """Groups of Samples from Agent Lightning rollouts. ``stop`` ends its thread.

    Rollouts are grouped by ``metadata["group_id"]``. A group that was announced with ``expect`` has the announced size,
    any other ``n_samples_per_prompt``; with one sample per prompt a rollout without a group id is a group of its own.
    ``metadata["instance_id"]`` names the task that a group is one try at; the ``ledger`` keeps account of instances.

    Args:
        store: the store to read; ``None`` gives placeholders, groups of unsampled Samples.
        reward_key: which of several named rewards to train on; by default the first.
        convert_validation: convert validation rollouts to Samples, too.
        text_only: keep what was said in validation rollouts of a model whose tokens nobody knows.
        reward_spans: the trainer takes rewards of turns as spans of a Sample (see ``ConversionOptions``).
        hold: the store outlives this process and states are saved: see ``EndTable``.
        producer: the component that enqueues rollouts, if it wants notifications.
        replay_files: the directory of routed experts and nuclei; what released rollouts have there is removed, unless
            ``removes_replay`` is off.
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
        text_only: bool = False,
        reward_spans: bool = False,
        hold: bool = False,
        producer: Producer | None = None,
        replay_files: Path | None = None,
        removes_replay: bool = True,
    ) -> None:
        self.settings = settings = settings or DataSourceSettings()
        self._store: Any = store
        self.n_samples_per_prompt = n_samples_per_prompt
        self.changed = threading.Condition()
        """Notified when there may be more to deliver; guards everything but the ledger."""
        self.assembler = GroupAssembler(policy=settings.policy, group_filter=settings.group_filter, ledger=ledger)
        self.ledger, self.delivery = self.assembler.ledger, self.assembler.delivery
        self.producer = producer or Producer()
        self.producer.source = self
        self.intake = Intake(
            store,
            assembler=self.assembler,
            producer=self.producer,
            changed=self.changed,
            read=partial(
                collect,
                self._store,
                tokenizer=tokenizer,
                reward_key=reward_key,
                convert_validation=convert_validation,
                text_only=text_only,
                reward_spans=reward_spans,
                replay_files=replay_files,
            ),
            default_size=n_samples_per_prompt,
            hold=hold,
            release=settings.release,
            replay_files=replay_files if removes_replay else None,
            poll_interval_s=settings.poll_interval_s,
            tick_s=(getattr(settings.policy, "timeout_s", None) or 10.0) / 10,
        )
        self.ends = self.intake.follower
        self._stopped = False
        self.ends.start()

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Up to ``num_samples`` groups, oldest first; waits until that many are ready or nothing more can come.

        Fewer groups come back when no rollout is in flight any more, or at the deadline. Raises ``DataSourceError``
        when there is none at the deadline: an empty list would make slime's default rollout function spin.
        """
        if self._store is None:
            return self.delivery.placeholders(num_samples, self.n_samples_per_prompt)
        self.ends.begin()
        timeout_s, blocking = self.settings.get_timeout_s, self.settings.blocking
        deadline = time.monotonic() + timeout_s
        with self.changed:
            while (
                blocking and (ready := self.delivery.deliverable) < num_samples and (not ready or self._more_to_come())
            ):
                self.raise_if_dead()
                if (remaining := deadline - time.monotonic()) <= 0:
                    break
                self.changed.wait(min(remaining, 1.0))
            self.raise_if_dead()
            if blocking and num_samples > 0 and not self.delivery.deliverable:
                counts = self.ledger.counts()
                raise DataSourceError(
                    f"no group of samples became ready within {timeout_s:g} s "
                    f"({counts.open} rollouts in flight, {counts.ready} ready, ended: {spell_ends(counts.reasons)})"
                )
            groups = self.delivery.take(num_samples)
            self.producer.delivered(len(groups))
            if blocking and num_samples > 0 and not groups:
                raise DataSourceError(f"no group can be trained on: a rollout {self.delivery.refused}")
            return groups

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Give groups back; they are delivered again before newer ones."""
        with self.changed:
            self.delivery.give_back(samples)
            self.changed.notify_all()

    def reserve(self, rollout_ids: Sequence[str] | None) -> int:
        """``get_samples`` delivers the ready groups that these rollouts belong to, in this order, and no others, and
        does not wait for more; ``None``: any, oldest first. Returns how many of those that were reserved before have
        not been delivered."""
        with self.changed:
            left = self.delivery.reserve(rollout_ids)
            self.changed.notify_all()
        return left

    def reserve_whole(self, rollout_ids: Sequence[str]) -> None:
        """``reserve``, as soon as all of these groups are ready here: another process, which follows the same store,
        has seen them ready. Raises ``DataSourceError`` when they are not at the deadline of ``get_samples``."""
        self.ends.begin()
        deadline = time.monotonic() + self.settings.get_timeout_s
        with self.changed:
            while True:
                self.raise_if_dead()
                self.delivery.reserve(rollout_ids)
                if (ready := self.delivery.deliverable) >= len(rollout_ids):
                    return
                if (remaining := deadline - time.monotonic()) <= 0:
                    self.delivery.reserve(None)
                    raise DataSourceError(
                        f"of {len(rollout_ids)} groups that a step is planned with, {ready} became ready within "
                        f"{self.settings.get_timeout_s:g} s"
                    )
                self.changed.wait(min(remaining, 1.0))

    @property
    def deliverable(self) -> int:
        """Groups that may be delivered now."""
        with self.changed:
            return self.delivery.deliverable

    def ready_groups(self) -> list[GroupResult]:
        """The groups that are ready, as far as their samples tell of them."""
        with self.changed:
            return [group_of(samples) for samples in self.delivery.ready]

    def reject(self, samples: Sequence[Sequence[Sample]], reason: str) -> None:
        """These groups were delivered and are not trained on (a dynamic sampling filter): counted as filtered for
        ``reason`` and not as trained."""
        with self.changed:
            self.delivery.reject(samples, reason)

    def __len__(self) -> int:
        """The groups that are ready."""
        return len(self.delivery.ready)

    def metrics(self) -> dict[str, float]:
        """``agl/…``: where rollouts stand, and how many ended how since the start."""
        counts = self.ledger.counts()
        metrics: dict[str, float] = {"agl/in_flight": counts.open, "agl/groups_ready": len(self.delivery.ready)}
        metrics.update({f"agl/{outcome.value}_total": count for outcome, count in counts.closed.items()})
        metrics.update({f"agl/{end.value}/{reason}": n for (end, reason), n in counts.reasons.items() if reason})
        return metrics

    def expect(self, group_id: str, *, size: int, mode: str = "train") -> None:
        """Announce a group before its rollouts are enqueued: its size and mode, so that failures finalize it too."""
        with self.changed:
            self.intake.announced = True
            self.assembler.announce(group_id, size=size, mode=mode)

    def opened(self, rollouts: Sequence[Rollout | str]) -> None:
        """These rollouts were enqueued: they are in flight in the ledger, and are asked about if the store does not
        tell of their end. A group whose members are known as rollouts, and not by their ids alone, can be finalized
        without those that are late."""
        self.intake.opened(rollouts)

    def set_version(self, version: str | int, *, named: bool = False) -> None:
        """The run has pushed this weight version, or begins with it; what others push is not trained on. ``named``:
        engines have it under this name, and until the next push no other is the run's either."""
        with self.changed:
            self.delivery.versions.push(str(version), named=named)

    def abandon(self, rollout_ids: Sequence[str], *, group_ids: Iterable[str] = (), reason: str) -> None:
        """These will not end any more, or nobody waits for them: cancelled in the ledger for ``reason``, their groups
        forgotten, and late reports of them ignored."""
        with self.changed:
            self.assembler.abandon(rollout_ids, group_ids=group_ids, reason=reason)
            self.changed.notify_all()

    def listen(
        self,
        *,
        on_member: Callable[[MemberResult], None] | None = None,
        on_group: Callable[[GroupResult], None] | None = None,
    ) -> None:
        """Call these for each rollout that has ended and each group that was finalized from now on; on the data
        source's thread, so they must be quick."""
        self.intake.on_member, self.intake.on_group = on_member, on_group

    def notify(self, rollout_id: str) -> None:
        """A rollout may have ended: look at it now. From any thread."""
        self.ends.submit(self.intake.look, rollout_id)

    def raise_if_dead(self) -> None:
        """Raise ``DataSourceError`` when the thread has ended."""
        if self._stopped:
            raise DataSourceError("the data source was stopped")
        if (failure := self.intake.failure) is not None:
            raise DataSourceError(f"the data source's thread ended: {failure}") from failure
        self.producer.raise_if_dead()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; waiting calls raise. Safe to call twice."""
        with self.changed:
            self._stopped = True
            self.changed.notify_all()
        self.ends.stop(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def state(self, *, checkpoint: int | None = None) -> dict[str, Any]:
        """What another data source needs to go on from here, for JSON. The ledger notes the step ``checkpoint`` at the
        same moment."""
        with self.changed:
            state = {**self.assembler.state(), **self.ends.table.state(), **self.producer.state()}
            state["waiting"] = list(dict.fromkeys([*state["waiting"], *self.intake.unread]))
            # a store that tells of nothing would give again all that was dealt with
            ended = state["ended"] if self.ends.tells or self.ends.feeds else self.ledger.recent_ids()
            state["ended"] = sorted({*ended})
            if checkpoint is not None:
                self.ledger.checkpoint(checkpoint)
            return state

    def saved(self, state: dict[str, Any]) -> None:
        """``state`` is kept from now on: what it has read before the one before it can be released in the store."""
        with self.changed:
            self.ends.table.saved(state["waiting"])

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from ``state``; raises ``KeyError``, ``TypeError`` or ``ValueError`` when it is none, and then nothing
        has changed."""
        waiting = state.get("waiting") or []
        with self.changed:
            self.assembler.restore(state)
            self.ledger.remember({*(state.get("ended") or ())} - {*waiting})
            self.ends.table.restore(state)
            self.ends.to_read.update(waiting)
            self.producer.restore(state)
            self.changed.notify_all()
        for rollout_id in waiting:
            self.notify(rollout_id)

    def _more_to_come(self) -> bool:
        if self.delivery.reserved:
            return False
        # without announcements nobody knows what is still to come: wait for the deadline
        if self.producer.endless or not self.intake.announced:
            return True
        return len(self.assembler) > 0 or self.ledger.counts().open > 0


class HoldsGroups(Protocol):
    """An ``AGLDataSource``, for whoever takes a ``GroupSource``."""

    groups: GroupSource


def spell_ends(reasons: dict[tuple[Outcome, str], int]) -> str:
    """How many ended how, as text."""
    ends = [f"{n} {outcome.value}{f' ({reason})' if reason else ''}" for (outcome, reason), n in reasons.items()]
    return ", ".join(ends) or "none"
