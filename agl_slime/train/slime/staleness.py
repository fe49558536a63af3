"""Bounded staleness under slime's driver: ``agl_max_staleness`` limits how far ahead of training groups are admitted.

slime trains on ``rollout_batch_size`` groups per step, so weights after ``r`` steps train on the groups of rollout
``r``. The steps that the current weights have seen follow from the engine: its version minus its version at the start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from agl_slime.data.delivery import Delivery, first_rollout
from agl_slime.data.results import GroupResult
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.loop.admission import Admission
from agl_slime.loop.tasks import TaskCursor
from agl_slime.train.slime.args import PluginSettings

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
        self._first_rollout = self._next_number = 0
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
            self._delivery, self._first_rollout = delivery, rollout_id
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
            fault = f"the saved state holds {self._next_number} groups that were admitted under a higher limit"
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
            self._start = self.version - self._first_rollout
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
        self._in_flight[name], self._next_number = self._next_number, self._next_number + 1
        step = self._admission.step
        self._admission.admit(self._in_flight[name], step=min(step, self._steps.get(name, step)))

    def _end(self, group_id: str, first: str) -> None:
        self._ready[first] = number = self._in_flight.pop(group_id)
        self._admission.end(number)
