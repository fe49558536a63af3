"""Enqueueing of tasks for slime's data source: the requested number of groups, and evaluation rollouts."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from agl_slime.data.enqueueing import HealthCheck, enqueue_groups, run_rollouts
from agl_slime.data.ingestor import Producer
from agl_slime.data.results import GroupResult, MemberResult
from agl_slime.data.source import GroupSource, format_outcomes
from agl_slime.errors import DataSourceError
from agl_slime.store.bridge import FINISHED
from agl_slime.support.agl import Rollout
from agl_slime.support.threads import run_blocking, run_user_code
from agl_slime.train.slime.connection import Connection, Evaluation
from agl_slime.train.slime.hooks import eval_entry
from agl_slime.train.slime.staleness import StalenessController

NO_EVALUATION = "there are no evaluation tasks: set agl_eval_tasks, or give --eval-prompt-data or the agent a make_task"
# Dropped groups in a row, per requested group, after which the producer gives up.
_MOST_DROPPED = 8


class TaskProducer(Producer):
    """Keeps the requested number of groups ready or in flight, or, with ``staleness``, as many as that admits. Dropped
    groups are replaced."""

    source: GroupSource

    def __init__(self, connection: Connection, staleness: StalenessController | None) -> None:
        self._connection, self._staleness = connection, staleness
        self._cursor, self._evals = connection.tasks, connection.evals
        self._requested = 0
        self._dropped_in_a_row = 0
        self._topping_up = asyncio.Lock()
        self._reconciling = False

    # -- requests by slime --------------------------------------------------------------------------------------------

    def request(self, groups: int) -> None:
        """See ``AGLDataSource.demand``."""
        self.source.follower.begin()
        with self.source.changed:
            self._requested = max(self._requested, groups)
            self.follow_up()

    def begin_unnumbered(self, rollout_id: int) -> None:
        """Start bounded staleness for a rollout function that does not pass rollout ids: only a non-blocking
        (fully-async) one can be paced."""
        if self._staleness is None or self._staleness.active:
            return
        if self.source.settings.blocking:
            self._staleness.warn_unpaced()
            self._staleness = None
        else:
            self.begin_rollout(rollout_id)

    def begin_rollout(self, rollout_id: int) -> None:
        """See ``AGLDataSource.begin_rollout``."""
        if self._staleness is not None:
            with self.source.changed:
                self._staleness.begin_rollout(rollout_id, self.source.delivery)
            if self.source.settings.blocking:
                run_blocking(self._ask_version(rollout_id))  # now: the weights change once slime continues
            else:
                self.source.follower.submit(self._ask_version, None)

    def reject(self, groups: int) -> None:
        """Note that this number of delivered groups is not trained on."""
        if self._staleness is not None:
            with self.source.changed:
                self._staleness.reject(groups)
                self.follow_up()

    def evaluate(self, rollout_id: int) -> dict[str, dict[str, Any]]:
        """See ``AGLDataSource.evaluate``."""
        if not self._evals:
            raise DataSourceError(NO_EVALUATION)
        self.source.follower.begin()
        members = run_blocking(self._evaluate(rollout_id))
        if not any(members.values()):
            ends = format_outcomes(self.source.ledger.counts().reasons)
            raise DataSourceError(f"all rollouts of evaluation {rollout_id} failed: {ends}")
        return {
            name: {**eval_entry([end.samples[-1] for end in ended]), "rewards": [end.reward for end in ended]}
            for name, ended in members.items()
            if ended  # slime divides by their number
        }

    async def _evaluate(self, rollout_id: int) -> dict[str, list[MemberResult]]:
        timeout_s = self.source.settings.get_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                ends = await asyncio.gather(*map(self._evaluate_set, self._evals))
        except TimeoutError as error:
            raise DataSourceError(f"evaluation {rollout_id} did not end within {timeout_s:g} s") from error
        return {evaluation.name: members for evaluation, members in zip(self._evals, ends, strict=True)}

    async def _evaluate_set(self, evaluation: Evaluation) -> list[MemberResult]:
        """The successful rollouts of a data set, in the order of its tasks."""
        groups = await run_user_code(evaluation.tasks.draw)
        enqueue = partial(self._connection.enqueue, size=1, mode="val", sampling=evaluation.sampling)
        health = HealthCheck(self.source.raise_if_dead)
        ends = {end.group_id: end async for end in run_rollouts(self.source, groups, enqueue, health=health)}
        members = [ends[group.group_id] for group in groups]
        size = evaluation.tasks.times if self._connection.settings.eval_whole else 1
        tasks = (members[start : start + size] for start in range(0, len(members), size))
        return [member for task in tasks if all(result.ok for result in task) for member in task]

    # -- callbacks of the source --------------------------------------------------------------------------------------

    def finalized(self, group: GroupResult) -> None:
        if self._cursor is None or not self._cursor.done(group.group_id):
            return
        self._cursor.learned([group])
        if self._staleness is not None:
            self._staleness.finalized(group)
        self._dropped_in_a_row = 0 if group.ready else self._dropped_in_a_row + 1
        if self._dropped_in_a_row >= _MOST_DROPPED * max(1, self._requested):
            failures = {f"{member.failure}: {member.failure_message}" for member in group.members if not member.ok}
            examples = "; ".join(sorted(failures)[:3])
            dropped = f"{self._dropped_in_a_row} groups in a row were dropped"
            raise DataSourceError(f"{dropped} ({group.reason}); {examples}")

    def delivered(self, groups: int) -> None:
        self._requested = max(0, self._requested - groups)
        if self._staleness is not None:
            self._staleness.delivered()

    def follow_up(self) -> None:
        if self._missing() > 0:
            self.source.follower.submit(self._top_up)

    def store_restarted(self) -> None:
        self._connection.store_restarted()
        if self._cursor is not None:
            self._cursor.repeat()
        if self._staleness is not None:
            self._staleness.pace()
        self.follow_up()

    def time_passed(self) -> None:
        if self._staleness is not None and self._staleness.active and not self.source.settings.blocking:
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
        if self._staleness is not None:
            state["pacing"] = self._staleness.state()
        return state

    def restore(self, state: dict[str, Any]) -> None:
        if self._cursor is None or state.get("demand") is None:
            return
        has_feed = self.source.follower.has_feed
        self._cursor.restore(state["demand"])
        self._reconciling = has_feed
        if not has_feed:
            self._cursor.repeat()  # the store was lost with the process that saved the state
        if self._staleness is not None:
            self._staleness.restore(state.get("pacing") or ())

    async def before_following(self) -> None:
        """Compare the restored state with the store, once: groups that were enqueued after the state was saved are
        adopted, groups that never reached the store are drawn again. Scans the whole store."""
        if not self._reconciling:
            return
        assert self._cursor is not None
        source, stored = self.source, dict[str, list[Rollout]]()
        for rollout in await source.follower.with_retries(self._connection.store.query_rollouts):
            stored.setdefault(str((rollout.metadata or {}).get("group_id")), []).append(rollout)
        with source.changed:
            # not groups that the store has partly released, as after restoring an older state than the last two
            complete = {name for name, rollouts in stored.items() if len(rollouts) >= source.n_samples_per_prompt}
            self._cursor.reconcile(complete)
            if self._staleness is not None:
                self._staleness.pace()
            unfinished = [rollout for name in self._cursor.in_flight for rollout in stored[name]]
            for group_id in self._cursor.in_flight:
                source.expect(group_id, size=source.n_samples_per_prompt)
            self._reconciling = False
            source.opened([rollout for rollout in unfinished if rollout.status not in FINISHED])

    # -- enqueueing ---------------------------------------------------------------------------------------------------

    async def _ask_version(self, rollout_id: int | None) -> None:
        version = await self._connection.weight_version()
        with self.source.changed:
            if self._staleness is not None:
                self._staleness.set_version(version, rollout_id=rollout_id)
            self.follow_up()

    async def _top_up(self) -> None:
        async with self._topping_up:
            with self.source.changed:
                if self._cursor is None or (missing := self._missing()) <= 0:
                    return
                groups = self._cursor.take(missing)
                if self._staleness is not None:
                    self._staleness.pace()
            size = self.source.n_samples_per_prompt
            oldest = self._staleness.version if self._staleness is not None else None
            enqueue = partial(self._connection.enqueue, size=size, mode="train", oldest_version=oldest)
            await enqueue_groups(self.source, groups, enqueue, size=size, mode="train")

    def _missing(self) -> int:
        if self._cursor is None or self._reconciling:
            return 0
        if self._staleness is not None and self._staleness.active:
            return self._staleness.free
        return self._requested - len(self.source.delivery.ready) - len(self._cursor.in_flight)
