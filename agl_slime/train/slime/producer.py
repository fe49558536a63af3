"""Enqueueing of tasks for slime's data source: the requested number of groups, evaluation rollouts, and
``agl_max_staleness``, which limits how far ahead of training groups are admitted.

slime trains on ``rollout_batch_size`` groups per step, so weights after ``r`` steps train on the groups of rollout
``r``. The steps that the current weights have seen follow from the engine: its version minus its version at the start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from agl_slime.data.client import HealthCheck, enqueue_groups, run_rollouts
from agl_slime.data.delivery import Delivery, first_rollout
from agl_slime.data.ingestor import Producer
from agl_slime.data.results import GroupResult, MemberResult
from agl_slime.data.source import GroupSource, format_outcomes
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.loop.admission import Admission
from agl_slime.loop.tasks import TaskCursor
from agl_slime.store.bridge import FINISHED
from agl_slime.support.agl import Rollout
from agl_slime.support.threads import run_blocking, run_user_code
from agl_slime.train.slime.args import PluginSettings
from agl_slime.train.slime.connection import Connection, Evaluation
from agl_slime.train.slime.hooks import eval_entry

logger = logging.getLogger(__name__)


class StalenessController:
    """Decides which groups of ``tasks`` are admitted, and delivered next, from the first rollout on; before it, it is
    not ``active``. Not thread-safe."""

    @classmethod
    def from_settings(cls, settings: PluginSettings, args: Any, tasks: Any) -> StalenessController | None:
        """The controller for ``agl_max_staleness``; ``None`` when that is not set. Raises ``ConfigError`` when slime's
        ``args`` have no batch size."""
        limit, batch_size = settings.max_staleness, getattr(args, "rollout_batch_size", None)
        if limit is None:
            return None
        if batch_size is None:
            raise ConfigError(f"agl_max_staleness {limit} needs slime's --rollout-batch-size, which is not set")
        return cls(tasks, batch_size=batch_size, max_staleness=limit)

    def __init__(self, tasks: TaskCursor, *, batch_size: int, max_staleness: int) -> None:
        self._tasks = tasks
        self._batch_size, self._max_staleness = batch_size, max_staleness
        self._admission = Admission(batch_size=batch_size, max_staleness=max_staleness)
        self._start: int | None = None  # the engine's version after 0 steps
        self.version: int | None = None
        """The version that the engines reported last."""
        self._first = self._next = 0
        self._in_flight: dict[str, int] = {}  # numbers of groups by group id
        self._ready: dict[str, int] = {}  # numbers of groups by the group's first rollout
        self._steps: dict[str, int] = {}  # admission steps of a loaded state's groups, oldest first
        self._delivery: Delivery | None = None

    @property
    def active(self) -> bool:
        return self._delivery is not None

    def warn_unpaced(self) -> None:
        """Warn that the limit is ignored, as the rollout function does not pass rollout ids."""
        needs = "works only with --rollout-function-path agl_slime.slime_hooks.generate_rollout; ignored"
        logger.warning("agl_max_staleness %d %s", self._max_staleness, needs)

    def begin_rollout(self, rollout_id: int, delivery: Delivery) -> None:
        """Note that slime requests this rollout, and so has taken the groups of all earlier ones. The first time, the
        groups that are ready or in flight already are admitted; raises ``DataSourceError`` when a restored state
        admitted them under a higher limit."""
        admission, begins = self._admission, not self.active
        if begins:
            self._delivery, self._first = delivery, rollout_id
            admission.advance(rollout_id)
            ready = dict.fromkeys(map(first_rollout, delivery.ready))
            order = {name: place for place, name in enumerate(self._steps)}
            for name in sorted([*self._tasks.in_flight, *ready], key=lambda name: order.get(name, len(order))):
                self._admit(name)
                if name in ready:
                    self._end(name, name)
        admission.taken = rollout_id * self._batch_size
        admission.advance(rollout_id - 1)  # at least: slime requests at most one rollout ahead of training
        if begins and admission.late():
            fault = f"the saved state holds {self._next} groups that were admitted under a higher limit"
            fix = "resume with the limit of its run"
            raise DataSourceError(f"agl_max_staleness {self._max_staleness}: {fault}; {fix}")
        self.pace()

    def set_version(self, version: str | None, *, rollout_id: int | None) -> None:
        """Note the engines' weight version, ``None`` if they report none. ``rollout_id`` is the requested rollout;
        ``None`` under fully-async rollouts, which request groups. Raises ``DataSourceError`` when the limit cannot be
        kept."""
        admission = self._admission
        if version is None or not version.isdecimal():
            if rollout_id is None:
                fault = f"the engine reports the weight version {version!r}; fully-async rollouts are paced by it"
                raise DataSourceError(f"agl_max_staleness {self._max_staleness}: {fault}, so it must be a whole number")
            admission.advance(rollout_id - (self._max_staleness > 0))
            return
        self.version = int(version)
        if self._start is None:
            self._start = self.version - self._first
        admission.advance(self.version - self._start)
        if rollout_id is not None and (behind := rollout_id - admission.step) > self._max_staleness:
            request = f"slime requests rollout {rollout_id} while weights after {admission.step} steps are in use"
            raise DataSourceError(f"agl_max_staleness {self._max_staleness}: {request}; set {behind} or more")

    def finalized(self, group: GroupResult) -> None:
        if group.ready and group.group_id in self._in_flight:
            self._end(group.group_id, group.succeeded[0].rollout_id)
        self.pace()

    def pace(self) -> None:
        """Admit drawn groups, drop lost and dropped ones, so that others may be admitted, and reserve the groups that
        may be delivered now: returned ones, which always may, then by age."""
        if self._delivery is None:
            return
        in_flight = self._tasks.in_flight
        for name in self._in_flight.keys() - in_flight:
            self._admission.replace(self._in_flight.pop(name))
        for name in in_flight:
            if name not in self._in_flight:
                self._admit(name)
        returned = [name for group in self._delivery.ready if (name := first_rollout(group)) not in self._ready]
        by_age = sorted(self._ready, key=self._ready.__getitem__)
        self._delivery.reserve(returned + by_age[: self._admission.available])

    @property
    def free(self) -> int:
        """The number of groups that may be enqueued now."""
        return self._admission.free

    def delivered(self) -> None:
        """Note that ready groups were delivered, oldest first."""
        if self._delivery is not None:
            remaining = {*map(first_rollout, self._delivery.ready)}
            taken = [name for name in self._ready if name not in remaining]
            self._admission.take(len(taken))
            for name in taken:
                del self._ready[name]

    def reject(self, groups: int) -> None:
        """Note that this number of delivered groups is not trained on."""
        if self.active:
            self._admission.reject(groups)
            self.pace()

    def state(self) -> list[tuple[str, int]]:
        """The groups in flight or ready, oldest first, each with its admission step."""
        steps = self._admission.state()
        numbers = sorted({**self._in_flight, **self._ready}.items(), key=itemgetter(1))
        return [(name, steps[str(number)]) for name, number in numbers]

    def restore(self, state: Iterable[tuple[str, int]]) -> None:
        """Resume with the admission steps of a saved ``state``; before the first rollout."""
        self._steps = dict(state)

    def _admit(self, name: str) -> None:
        self._in_flight[name], self._next = self._next, self._next + 1
        step = self._admission.step
        self._admission.admit(self._in_flight[name], step=min(step, self._steps.get(name, step)))

    def _end(self, group_id: str, first: str) -> None:
        self._ready[first] = number = self._in_flight.pop(group_id)
        self._admission.end(number)


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
        return {name: eval_data(ended) for name, ended in members.items() if ended}  # slime divides by their number

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


def eval_data(members: Sequence[MemberResult]) -> dict[str, Any]:
    """slime's evaluation data, with an entry per successful rollout."""
    entry = eval_entry([member.samples[-1] for member in members])
    return {**entry, "rewards": [member.reward for member in members]}
