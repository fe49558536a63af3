"""``GroupSource``: finished rollouts of a ``LightningStore`` as groups of Samples.

A thread with an event loop follows the store (``completions``), reads each completed rollout and adds it to its group
(``ingestor``); ready groups wait in the assembler's delivery for ``get_samples``. slime builds
``agl_slime.AGLDataSource``, which has a ``GroupSource``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from agl_slime.data.assembler import GroupAssembler
from agl_slime.data.ingestor import Producer, RolloutIngestor
from agl_slime.data.ledger import Ledger
from agl_slime.data.policy import GroupFilter, GroupPolicy, MinimumViableGroup
from agl_slime.data.read import read_rollout
from agl_slime.data.results import GroupResult, MemberResult, OnEnd, Outcome, group_of
from agl_slime.errors import DataSourceError
from agl_slime.support.agl import EnqueueRolloutRequest, LightningStore, Rollout, threaded
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
    """Whether a group may be trained on, and what happens to failed and late members."""
    group_filter: GroupFilter | None = None
    """A filter that drops groups which the policy accepted, such as ``zero_variance``."""

    def __post_init__(self) -> None:
        check_ranges(self, ("get_timeout_s poll_interval_s", lambda value: value > 0, "above 0 seconds"))


class GroupSource:
    """Groups of Samples from Agent Lightning rollouts. ``stop`` ends its thread.

    Rollouts are grouped by ``metadata["group_id"]``. A group that was announced with ``expect`` has the announced size,
    any other ``n_samples_per_prompt``; with one sample per prompt a rollout without a group id is a group of its own.
    ``metadata["instance_id"]`` names the task of a group; the ``ledger`` counts tasks by it.

    Args:
        store: the store to read; ``None`` gives placeholders, groups of unsampled Samples.
        reward_key: which of several named rewards to train on; by default the first of the first rollout, in the order
            of ``opened``, that has names. States keep it.
        convert_validation: convert validation rollouts to Samples, too.
        text_only: keep the text of validation rollouts, for a model whose token ids are unknown.
        reward_spans: the trainer takes rewards of turns as spans of a Sample (see ``ConversionOptions``).
        hold: the store outlives this process and states are saved: see ``CompletionTable``.
        producer: the component that enqueues rollouts, if it wants notifications.
        replay_files: the directory of routed experts and nuclei; the files of released rollouts are removed from it
            unless ``removes_replay`` is off.
        annotate: completes a result before it joins its group (``data.teacher.Teachers``).
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
        annotate: Callable[[MemberResult], Awaitable[MemberResult]] | None = None,
    ) -> None:
        self.settings = settings = settings or DataSourceSettings()
        self._store = store = threaded(store)
        self.n_samples_per_prompt = n_samples_per_prompt
        self.changed = threading.Condition()
        """Notified when there may be more groups to deliver; guards everything but the ledger."""
        self.assembler = GroupAssembler(policy=settings.policy, group_filter=settings.group_filter, ledger=ledger)
        self.ledger, self.delivery = self.assembler.ledger, self.assembler.delivery
        self.producer = producer or Producer()
        self.producer.source = self

        async def read_and_annotate(rollout_id: str) -> MemberResult | None:
            member = await read_rollout(
                self._store,
                rollout_id,
                tokenizer=tokenizer,
                reward_key=reward_key,
                run_key=self.ingestor.run_key,
                convert_validation=convert_validation,
                text_only=text_only,
                reward_spans=reward_spans,
                replay_files=replay_files,
            )
            return member if member is None or annotate is None else await annotate(member)

        self.ingestor = RolloutIngestor(
            store,
            assembler=self.assembler,
            producer=self.producer,
            changed=self.changed,
            read=read_and_annotate,
            default_size=n_samples_per_prompt,
            run_key=reward_key,
            patience_s=getattr(settings.policy, "timeout_s", None),
            hold=hold,
            release=settings.release,
            replay_files=replay_files if removes_replay else None,
            poll_interval_s=settings.poll_interval_s,
            tick_s=(getattr(settings.policy, "timeout_s", None) or 10.0) / 10,
        )
        self.follower = self.ingestor.follower
        self._stopped = False

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Up to ``num_samples`` groups, oldest first; waits until that many are ready or no more can become ready.
        Fewer groups come back when no rollout is in flight any more, or at the deadline. Raises ``DataSourceError``
        when there is none at the deadline: an empty list would make slime's default rollout function spin."""
        if self._store is None:
            return self.delivery.placeholders(num_samples, self.n_samples_per_prompt)
        self.follower.begin()
        timeout_s, blocking = self.settings.get_timeout_s, self.settings.blocking

        def enough() -> bool:
            ready = self.delivery.deliverable
            return not blocking or ready >= num_samples or (ready > 0 and not self._more_to_come())

        with self.changed:
            self._wait(enough)
            if blocking and num_samples > 0 and not self.delivery.deliverable:
                counts = self.ledger.counts()
                raise DataSourceError(
                    f"no group of samples became ready within {timeout_s:g} s "
                    f"({counts.open} rollouts in flight, {counts.ready} ready, "
                    f"ended: {format_outcomes(counts.reasons)})"
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
        """Limit ``get_samples`` to the ready groups of these rollouts, in this order, without waiting for more;
        ``None`` lifts the limit. Returns how many of the previously reserved groups were not delivered."""
        with self.changed:
            undelivered = self.delivery.reserve(rollout_ids)
            self.changed.notify_all()
        return undelivered

    def reserve_whole(self, rollout_ids: Sequence[str]) -> None:
        """Wait until all of these groups are ready, then ``reserve`` them: another process, which follows the same
        store, has seen them ready. Raises ``DataSourceError`` at the deadline of ``get_samples``."""
        self.follower.begin()

        def whole() -> bool:
            self.delivery.reserve(rollout_ids)
            return self.delivery.deliverable >= len(rollout_ids)

        with self.changed:
            if not self._wait(whole):
                ready, planned = self.delivery.deliverable, f"{len(rollout_ids)} groups that a step is planned with"
                self.delivery.reserve(None)
                raise DataSourceError(f"of {planned}, {ready} became ready within {self.settings.get_timeout_s:g} s")

    @property
    def deliverable(self) -> int:
        with self.changed:
            return self.delivery.deliverable

    def ready_groups(self) -> list[GroupResult]:
        """The ready groups, rebuilt from their Samples."""
        with self.changed:
            return [group_of(samples, self.delivery.conversations) for samples in self.delivery.ready]

    def reject(self, samples: Sequence[Sequence[Sample]], reason: str) -> None:
        """Count delivered groups as filtered for ``reason`` and not as trained (a dynamic sampling filter)."""
        with self.changed:
            self.delivery.reject(samples, reason)

    def __len__(self) -> int:
        """The number of ready groups."""
        return len(self.delivery.ready)

    def metrics(self) -> dict[str, float]:
        """``agl/…``: rollouts in flight, ready groups, and outcomes since the start."""
        counts = self.ledger.counts()
        metrics: dict[str, float] = {"agl/in_flight": counts.open, "agl/groups_ready": len(self.delivery.ready)}
        metrics.update({f"agl/{outcome.value}_total": count for outcome, count in counts.closed.items()})
        metrics.update({f"agl/{end.value}/{reason}": n for (end, reason), n in counts.reasons.items() if reason})
        return metrics

    def expect(self, group_id: str, *, size: int, mode: str = "train", on_end: OnEnd | None = None) -> None:
        """Announce a group before its rollouts are enqueued: its size and mode, so that failures finalize it too.
        ``on_end`` is called on the data source's thread."""
        self.follower.start()
        with self.changed:
            self.ingestor.announced = True
            self.assembler.announce(group_id, size=size, mode=mode)
            if on_end is not None:
                self.ingestor.on_end[group_id] = on_end

    def hold_back(self, requests: Sequence[EnqueueRolloutRequest], *, size: int, pilot: int) -> list[Any]:
        """The first ``pilot`` of each announced group's ``size`` requests; see ``GroupAssembler.hold_back``."""
        groups = [requests[start : start + size] for start in range(0, len(requests), size)]
        with self.changed:
            for group in groups:
                self.assembler.hold_back(str((group[0].metadata or {})["group_id"]), group[pilot:])
        return [request for group in groups for request in group[:pilot]]

    def opened(self, rollouts: Sequence[Rollout | str]) -> None:
        """Note that these rollouts were enqueued: they are in flight, and a store without notifications is polled about
        them. A group may be finalized without members that come as ``Rollout`` objects, not ids."""
        self.follower.start()
        self.ingestor.opened(rollouts)

    def set_version(self, version: str | int, *, named: bool = False) -> None:
        """Note that the run pushed this weight version, or starts with it; tokens of versions that others push are not
        trained on. ``named``: the engines report exactly this name until the next push."""
        with self.changed:
            self.delivery.versions.push(str(version), named=named)

    def abandon(self, rollout_ids: Sequence[str], *, group_ids: Iterable[str] = (), reason: str) -> None:
        """Count these rollouts as cancelled for ``reason``, forget their groups and ignore later reports."""
        with self.changed:
            self.assembler.abandon(rollout_ids, group_ids=group_ids, reason=reason)
            self.changed.notify_all()

    def cancel(self, group_ids: Iterable[str], *, reason: str) -> None:
        """Cancel the unfinished ones of these groups for ``reason``, with their rollouts in the store."""
        with self.changed:
            for group_id in group_ids:
                self.ingestor.on_end.pop(group_id, None)
                self.assembler.cancel(group_id, reason)
            self.ingestor.follow_up()

    def listen(
        self,
        *,
        on_member: Callable[[MemberResult], None] | None = None,
        on_group: Callable[[GroupResult], None] | None = None,
    ) -> None:
        """Call ``on_member`` for each completed rollout and ``on_group`` for each finalized group from now on. Both run
        on the data source's thread and must be quick."""
        self.ingestor.on_member, self.ingestor.on_group = on_member, on_group

    def notify(self, rollout_id: str) -> None:
        """Read a rollout if it has ended. From any thread."""
        self.follower.submit(self.ingestor.read_if_finished, rollout_id)

    def raise_if_dead(self) -> None:
        """Raise ``DataSourceError`` when the thread has ended."""
        if self._stopped:
            raise DataSourceError("the data source was stopped")
        if (failure := self.ingestor.failure) is not None:
            raise DataSourceError(f"the data source's thread ended: {failure}") from failure
        self.producer.raise_if_dead()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread; waiting calls raise. Safe to call twice."""
        with self.changed:
            self._stopped = True
            self.changed.notify_all()
        self.ingestor.report_lost_groups()
        self.follower.stop(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def state(self, *, checkpoint: int | None = None) -> dict[str, Any]:
        """The state from which another source resumes, for JSON; with it the ledger notes the step ``checkpoint``."""
        with self.changed:
            state = {**self.assembler.state(), **self.follower.table.state(), **self.producer.state()}
            state["waiting"] = list(dict.fromkeys([*state["waiting"], *self.ingestor.unread]))
            # a polled store lists finished rollouts again: remember their ids
            ended = state["ended"] if self.follower.notifies or self.follower.has_feed else self.ledger.recent_ids()
            state["ended"] = sorted({*ended})
            state["run_key"] = self.ingestor.run_key
            if checkpoint is not None:
                self.ledger.checkpoint(checkpoint)
            return state

    def saved(self, state: dict[str, Any]) -> None:
        """Note that ``state`` was saved: rollouts that the state before it had read can be released in the store."""
        with self.changed:
            self.follower.table.saved(state["waiting"])

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from ``state``. Raises ``KeyError``, ``TypeError`` or ``ValueError``, unchanged, for anything else."""
        waiting = state.get("waiting") or []
        with self.changed:
            self.assembler.restore(state)
            self.ledger.remember({*(state.get("ended") or ())} - {*waiting})
            self.follower.table.restore(state)
            self.follower.pending_reads.update(waiting)
            self.producer.restore(state)
            self.ingestor.resume(state.get("run_key"), waiting)
            self.changed.notify_all()
        for rollout_id in waiting:
            self.notify(rollout_id)

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Wait until ``condition`` holds, with the lock held; ``False`` at the deadline of ``get_samples``."""
        deadline = time.monotonic() + self.settings.get_timeout_s
        while not (holds := condition()):
            self.raise_if_dead()
            if (remaining := deadline - time.monotonic()) <= 0:
                break
            self.changed.wait(min(remaining, 1.0))
        self.raise_if_dead()
        return holds

    def _more_to_come(self) -> bool:
        if self.producer.endless:
            return True
        if self.delivery.reserved is not None:
            return False
        # without announcements more rollouts may come at any time: wait for the deadline
        return not self.ingestor.announced or len(self.assembler) > 0 or self.ledger.counts().open > 0


def format_outcomes(reasons: dict[tuple[Outcome, str], int]) -> str:
    ends = [f"{n} {outcome.value}{f' ({reason})' if reason else ''}" for (outcome, reason), n in reasons.items()]
    return ", ".join(ends) or "none"
