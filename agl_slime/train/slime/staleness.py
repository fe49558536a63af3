"""Bounded staleness under slime's driver: ``agl_max_staleness`` limits how far ahead of training groups are admitted.

slime trains on ``rollout_batch_size`` groups per step, so weights after ``r`` steps train on the groups of rollout
``r``. The steps that the current weights have seen follow from the engine: its version minus its version at the start.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from agl_slime.data.results import GroupResult, rollout_of
from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.loop.admission import Admission
from agl_slime.train.slime.args import PluginSettings
from agl_slime.types import Sample

logger = logging.getLogger(__name__)

_NOW = sys.maxsize


class StalenessController:
    """Decides which groups a data source admits and delivers, from the first rollout on; before it, it is not
    ``active``. Not thread-safe."""

    @classmethod
    def from_settings(cls, settings: PluginSettings, args: Any) -> StalenessController | None:
        """The controller for ``agl_max_staleness``; ``None`` when that is not set. Raises ``ConfigError`` when slime's
        ``args`` have no batch size."""
        limit, batch_size = settings.max_staleness, getattr(args, "rollout_batch_size", None)
        if limit is None:
            return None
        if batch_size is None:
            raise ConfigError(f"agl_max_staleness {limit} needs slime's --rollout-batch-size, which is not set")
        return cls(batch_size=batch_size, max_staleness=limit)

    def __init__(self, *, batch_size: int, max_staleness: int) -> None:
        self._batch_size, self._max_staleness = batch_size, max_staleness
        self._admission = Admission(batch_size=batch_size, max_staleness=max_staleness)
        self._start: int | None = None  # the engine's version after 0 steps
        self._first = self._next = 0
        self._in_flight: dict[str, int] = {}  # numbers of groups by group id
        self._ready: dict[str, int] = {}  # numbers of groups by the group's first rollout
        self._restored: list[tuple[str, int, bool]] = []  # groups of a loaded state: name, admission step, ready
        self.active = False

    def warn_unpaced(self) -> None:
        """Warn that the limit is ignored, as the rollout function does not pass rollout ids."""
        needs = "works only with --rollout-function-path agl_slime.slime_hooks.generate_rollout; ignored"
        logger.warning("agl_max_staleness %d %s", self._max_staleness, needs)

    def begin_rollout(self, rollout_id: int) -> None:
        """Note that slime requests this rollout, and so has taken the groups of all earlier ones. Raises
        ``DataSourceError`` when groups of a restored state were admitted under a higher limit."""
        admission, begins = self._admission, not self.active
        if begins:
            self.active, self._first = True, rollout_id
            admission.advance(rollout_id)
            for name, at, ready in self._restored:
                number = self._admit([name], at=min(at, rollout_id))
                if ready:
                    self._ready[name] = self._in_flight.pop(name)
                    admission.end(number)
        admission.taken = rollout_id * self._batch_size
        admission.advance(rollout_id - 1)  # at least: slime requests at most one rollout ahead of training
        if begins and admission.late():
            why = f"the saved state holds {len(self._restored)} groups that were admitted under a higher limit"
            fix = "resume with the limit of its run"
            raise DataSourceError(f"agl_max_staleness {self._max_staleness}: {why}; {fix}")

    def set_version(self, version: str | None, *, rollout_id: int | None) -> None:
        """Note the engines' weight version, ``None`` if they report none. ``rollout_id`` is the requested rollout;
        ``None`` under fully-async rollouts, which request groups. Raises ``DataSourceError`` when the limit cannot be
        kept."""
        admission = self._admission
        if version is None or not version.isdecimal():
            if rollout_id is None:
                why = f"the engine reports the weight version {version!r}; fully-async rollouts are paced by it"
                raise DataSourceError(f"agl_max_staleness {self._max_staleness}: {why}, so it must be a whole number")
            admission.advance(rollout_id - (self._max_staleness > 0))
            return
        if self._start is None:
            self._start = int(version) - self._first
        admission.advance(int(version) - self._start)
        if rollout_id is not None and (behind := rollout_id - admission.step) > self._max_staleness:
            request = f"slime requests rollout {rollout_id} while weights after {admission.step} steps are in use"
            raise DataSourceError(f"agl_max_staleness {self._max_staleness}: {request}; set {behind} or more")

    def admit(self, group_ids: Iterable[str]) -> None:
        if self.active:
            self._admit(group_ids)

    def finalized(self, group: GroupResult) -> None:
        number = self._in_flight.pop(group.group_id, None)
        if number is not None and group.ready:
            self._ready[group.succeeded[0].rollout_id] = number
            self._admission.end(number)
        elif number is not None:
            self._admission.replace(number)

    def drop_in_flight(self) -> None:
        """Drop the groups in flight, which are lost, so that others may be admitted."""
        for number in self._in_flight.values():
            self._admission.replace(number)
        self._in_flight.clear()

    def reconcile(self, in_flight: Iterable[str]) -> None:
        """Adopt the groups that the store has in flight after a restart, in place of the loaded state's."""
        stored = [*in_flight]
        for name in [*self._in_flight.keys() - {*stored}]:
            self._admission.replace(self._in_flight.pop(name))
        self._restored = [one for one in self._restored if one[2] or one[0] in stored]
        if self.active:
            self._admit(name for name in stored if name not in self._in_flight)
        else:
            names = {name for name, *_ in self._restored}
            self._restored += [(name, _NOW, False) for name in stored if name not in names]

    @property
    def free(self) -> int:
        """The number of groups that may be enqueued now."""
        return self._admission.free

    def deliverable(self, ready: Iterable[Sequence[Sample]]) -> int:
        """The number of ready groups that may be delivered; groups that were given back always may."""
        return sum(_name(group) not in self._ready for group in ready) + self._admission.available

    def take(self, ready: deque[list[Sample]], n: int) -> int:
        """Move up to ``n`` deliverable groups to the front, returned groups first; returns their number."""
        n = min(n, self.deliverable(ready))
        ordered = sorted(ready, key=lambda group: self._ready.get(_name(group), -1))
        ready.clear()
        ready.extend(ordered)
        fresh = [name for group in ordered[:n] if (name := _name(group)) in self._ready]
        self._admission.take(len(fresh))
        for name in fresh:
            del self._ready[name]
        return n

    def reject(self, groups: int) -> None:
        """Note that this number of delivered groups is not trained on."""
        if self.active:
            self._admission.reject(groups)

    def state(self) -> list[tuple[str, int]]:
        """The groups in flight or ready, oldest first, each with its admission step."""
        steps = self._admission.state()
        numbers = sorted({**self._in_flight, **self._ready}.items(), key=itemgetter(1))
        return [(name, steps[str(number)]) for name, number in numbers]

    def restore(
        self, state: Iterable[tuple[str, int]], *, ready: Iterable[Sequence[Sample]], in_flight: Iterable[str]
    ) -> None:
        """Resume with the groups that the data source has restored."""
        steps = dict(state)
        is_ready = {**dict.fromkeys(in_flight, False), **{_name(group): True for group in ready}}
        self._restored = [(name, at, is_ready[name]) for name, at in steps.items() if name in is_ready]
        self._restored += [(name, _NOW, ready) for name, ready in is_ready.items() if name not in steps]

    def _admit(self, names: Iterable[str], at: int | None = None) -> int:
        for name in names:
            self._in_flight[name], self._next = self._next, self._next + 1
            self._admission.admit(self._in_flight[name], at=at)
        return self._next - 1


def _name(group: Sequence[Sample]) -> str:
    return (rollout_of(group[0]) if group else None) or ""
