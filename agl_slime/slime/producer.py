"""The tasks that a data source of slime's enqueues: as many groups as are asked for, and validation rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from agl_slime.datasource.ingestor import Producer
from agl_slime.datasource.source import GroupSource, format_outcomes
from agl_slime.errors import DataSourceError
from agl_slime.groups.results import GroupResult
from agl_slime.loop.tasks import TaskGroup
from agl_slime.slime.connection import Connection
from agl_slime.slime.staleness import StalenessController
from agl_slime.slime.states import eval_data
from agl_slime.store.bridge import FINISHED
from agl_slime.support.agl import Rollout
from agl_slime.support.threads import run_blocking

# So many dropped groups in a row, and at least so many for each that is wanted, are no bad luck.
_HOPELESS = 8


class TaskProducer(Producer):
    """Has as many groups ready or under way as are wanted; with ``pacing`` so far ahead of training as that allows. A
    group that is dropped is replaced."""

    source: GroupSource

    def __init__(self, connection: Connection, pacing: StalenessController | None) -> None:
        self._connection, self._pacing = connection, pacing
        self._cursor, self._evals = connection.tasks, connection.evals
        self._wanted = 0
        self._dropped_in_a_row = 0
        self._topping_up = asyncio.Lock()
        self._reconciling = False
        self._evaluated: dict[str, GroupResult] = {}

    # -- what slime asks for ------------------------------------------------------------------------------------------

    def want(self, groups: int) -> None:
        """See ``AGLDataSource.demand``."""
        self.source.follower.begin()
        with self.source.changed:
            self._wanted = max(self._wanted, groups)
            self.follow_up()

    def begin_unnumbered(self, rollout_id: int) -> None:
        """Before the first groups are taken, where nobody has said which rollout it is."""
        if self._pacing is None or self._pacing.on:
            return
        if self.source.settings.blocking:
            self._pacing = self._pacing.warn_unpaced()
        else:
            self.pace(rollout_id)

    def pace(self, rollout_id: int) -> None:
        """See ``AGLDataSource.pace``."""
        if self._pacing is not None:
            with self.source.changed:
                self._pacing.asked(rollout_id)
                self.source.delivery.control = self._pacing
            if self.source.settings.blocking:
                run_blocking(self._ask_version(rollout_id))  # now: the weights change when slime goes on
            else:
                self.source.follower.submit(self._ask_version, None)

    def rejected(self, groups: int) -> None:
        """So many that were delivered are not trained on."""
        if self._pacing is not None:
            with self.source.changed:
                self._pacing.rejected(groups)
                self.follow_up()

    def evaluate(self, rollout_id: int) -> dict[str, dict[str, Any]]:
        """See ``AGLDataSource.evaluate``."""
        if not self._evals:
            what = "set agl_eval_tasks (AGL_SLIME_EVAL_TASKS) or --eval-prompt-data"
            raise DataSourceError(f"there are no evaluation tasks: {what}")
        source = self.source
        source.follower.begin()
        timeout_s = source.settings.get_timeout_s
        deadline = time.monotonic() + timeout_s
        with source.changed:
            names: dict[str, list[str]] = {}
            for one in self._evals:
                groups = one.cursor.take(one.rollouts)
                names[one.name] = [group.group_id for group in groups]
                source.follower.submit(self._enqueue, groups, 1, "val", one.sampling)
            wanted = {name for group_ids in names.values() for name in group_ids}
            while not self._evaluated.keys() >= wanted:
                source.raise_if_dead()
                if time.monotonic() > deadline:
                    raise DataSourceError(f"evaluation {rollout_id} did not end within {timeout_s:g} s")
                source.changed.wait(1.0)
            members = {
                name: [member for group_id in group_ids for member in self._evaluated.pop(group_id).succeeded]
                for name, group_ids in names.items()
            }
        if not any(members.values()):
            ends = format_outcomes(source.ledger.counts().reasons)
            raise DataSourceError(f"all {len(wanted)} rollouts of evaluation {rollout_id} failed: {ends}")
        return {name: eval_data(ended) for name, ended in members.items() if ended}  # slime divides by their number

    # -- what the source tells ----------------------------------------------------------------------------------------

    def finalized(self, group: GroupResult) -> None:
        if any(one.cursor.done(group.group_id) for one in self._evals):
            self._evaluated[group.group_id] = group
        if self._cursor is None or not self._cursor.done(group.group_id):
            return
        if self._pacing is not None:
            self._pacing.finalized(group)
        self._dropped_in_a_row = 0 if group.ready else self._dropped_in_a_row + 1
        if self._dropped_in_a_row >= _HOPELESS * max(1, self._wanted):
            failures = {f"{member.failure}: {member.failure_message}" for member in group.members if not member.ok}
            examples = "; ".join(sorted(failures)[:3])
            dropped = f"{self._dropped_in_a_row} groups in a row were not fit to train on"
            raise DataSourceError(f"{dropped} ({group.reason}); {examples}")

    def delivered(self, groups: int) -> None:
        self._wanted = max(0, self._wanted - groups)

    def follow_up(self) -> None:
        if self._missing() > 0:
            self.source.follower.submit(self._top_up)

    def store_restarted(self) -> None:
        self._connection.forget()
        for one in self._evals:
            self.source.follower.submit(self._enqueue, list(one.cursor.in_flight.values()), 1, "val", one.sampling)
        if self._cursor is not None:
            self._cursor.repeat()
        if self._pacing is not None:
            self._pacing.lost()
        self.follow_up()

    def time_passed(self) -> None:
        if self._pacing is not None and self._pacing.on and not self.source.settings.blocking:
            self.source.follower.submit(self._ask_version, None)

    def raise_if_dead(self) -> None:
        self._connection.raise_if_dead()

    @property
    def endless(self) -> bool:
        return True

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        if self._cursor is not None:
            state["demand"] = self._cursor.state()
        if self._pacing is not None:
            state["pacing"] = self._pacing.state()
        return state

    def restore(self, state: dict[str, Any]) -> None:
        if self._cursor is None or state.get("demand") is None:
            return
        feeds = self.source.follower.has_feed
        self._cursor.restore(state["demand"])
        self._reconciling = feeds
        if not feeds:
            self._cursor.repeat()  # the store was in the process that saved
        if self._pacing is not None:
            under_way = self._cursor.in_flight if feeds else ()
            self._pacing.restore(state.get("pacing") or (), ready=self.source.delivery.ready, under_way=under_way)

    async def before_following(self) -> None:
        """Find in the store the groups that were enqueued after the restored state was saved, and those of that state
        that had not got there; this looks at all that the store holds, once."""
        if not self._reconciling:
            return
        assert self._cursor is not None
        source, found = self.source, dict[str, list[Rollout]]()
        for rollout in await source.follower.with_retries(self._connection.store.query_rollouts):
            found.setdefault(str((rollout.metadata or {}).get("group_id")), []).append(rollout)
        with source.changed:
            # not those of which the store has forgotten a part, as after a state from before the last two
            whole = {name for name, rollouts in found.items() if len(rollouts) >= source.n_samples_per_prompt}
            self._cursor.reconcile(whole)
            if self._pacing is not None:
                self._pacing.reconciled(self._cursor.in_flight)
            ours = [rollout for name in self._cursor.in_flight for rollout in found[name]]
            for group_id in self._cursor.in_flight:
                source.expect(group_id, size=source.n_samples_per_prompt)
            self._reconciling = False
            source.opened([rollout for rollout in ours if rollout.status not in FINISHED])

    # -- enqueueing ---------------------------------------------------------------------------------------------------

    async def _ask_version(self, rollout_id: int | None) -> None:
        version = await self._connection.weight_version()
        with self.source.changed:
            if self._pacing is not None:
                self._pacing.weights(version, rollout_id=rollout_id)
            self.follow_up()

    async def _top_up(self) -> None:
        """Enqueue what is missing."""
        async with self._topping_up:
            with self.source.changed:
                if self._cursor is None or (missing := self._missing()) <= 0:
                    return
                groups = self._cursor.take(missing)
                if self._pacing is not None:
                    self._pacing.admitted(group.group_id for group in groups)
            await self._enqueue(groups, self.source.n_samples_per_prompt, "train")

    async def _enqueue(self, groups: Sequence[TaskGroup], size: int, mode: Any, sampling: Any = None) -> None:
        for group in groups:
            self.source.expect(group.group_id, size=size, mode=mode)
        enqueue = self._connection.enqueue
        self.source.opened(
            await self.source.follower.with_retries(lambda: enqueue(groups, size=size, mode=mode, sampling=sampling))
        )

    def _missing(self) -> int:
        if self._cursor is None or self._reconciling:
            return 0
        if self._pacing is not None and self._pacing.on:
            return self._pacing.free
        return self._wanted - len(self.source.delivery.ready) - len(self._cursor.in_flight)
