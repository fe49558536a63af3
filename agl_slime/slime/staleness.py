"""How far ahead of slime's training a data source enqueues: ``agl_max_staleness`` kept by what is admitted.

slime trains on ``rollout_batch_size`` groups per step, so the groups of rollout ``r`` are trained on by weights of
``r`` steps. How many steps the weights in use have seen is what the engine says: its version now, less the one at the
start.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any

from agl_slime.errors import ConfigError, DataSourceError
from agl_slime.groups.results import GroupResult, rollout_of
from agl_slime.loop.admission import Admission
from agl_slime.slime.args import PluginSettings
from agl_slime.types import Sample

logger = logging.getLogger(__name__)

_NOW = sys.maxsize


class StalenessController:
    """Which groups a data source admits and delivers. It begins with the first rollout that is asked for; until then
    it is not ``on`` and paces nothing. Not thread-safe."""

    @classmethod
    def of(cls, settings: PluginSettings, args: Any) -> StalenessController | None:
        """What ``settings`` ask for, if they do; raises ``ConfigError`` where slime's ``args`` know no batch size."""
        limit, batch_size = settings.max_staleness, getattr(args, "rollout_batch_size", None)
        if limit is None:
            return None
        if batch_size is None:
            raise ConfigError(f"agl_max_staleness {limit} needs slime's --rollout-batch-size, which is not set")
        return cls(batch_size=batch_size, max_staleness=limit)

    def __init__(self, *, batch_size: int, max_staleness: int) -> None:
        self._batch_size, self._max_staleness = batch_size, max_staleness
        self._admission = Admission(batch_size=batch_size, max_staleness=max_staleness)
        self._start: int | None = None  # the engine's version, less the steps that it stands for
        self._first = self._next = 0
        self._under_way: dict[str, int] = {}  # group ids with the groups' numbers
        self._ready: dict[str, int] = {}  # the same by the first rollout of each
        self._before: list[tuple[str, int, bool]] = []  # of a loaded state: name, step, whether it is ready
        self.on = False

    def warn_unpaced(self) -> None:
        """A rollout function that does not say which rollout it is at is not paced."""
        needs = "works only with --rollout-function-path agl_slime.slime_hooks.generate_rollout; ignored"
        logger.warning("agl_max_staleness %d %s", self._max_staleness, needs)

    def asked(self, rollout_id: int) -> None:
        """slime asks for this rollout: the groups of those before it are taken. Raises ``DataSourceError`` when those
        of a restored state were admitted under a higher limit."""
        admission, begins = self._admission, not self.on
        if begins:
            self.on, self._first = True, rollout_id
            admission.advance(rollout_id)
            for name, at, ready in self._before:
                number = self._admit([name], at=min(at, rollout_id))
                if ready:
                    self._ready[name] = self._under_way.pop(name)
                    admission.end(number)
        admission.taken = rollout_id * self._batch_size
        admission.advance(rollout_id - 1)  # at least: training does not wait for more than one rollout
        if begins and admission.late():
            why = f"the saved state holds {len(self._before)} groups that were admitted under a higher limit"
            fix = "resume with the limit of its run"
            raise DataSourceError(f"agl_max_staleness {self._max_staleness}: {why}; {fix}")

    def weights(self, version: str | None, *, rollout_id: int | None) -> None:
        """The version that the engines report when ``rollout_id`` is asked for, or, where slime asks for groups and not
        for rollouts, at any time; ``None`` where they do not say. Raises ``DataSourceError`` when the limit cannot be
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
            asks = f"slime asks for rollout {rollout_id} while weights of {admission.step} steps are in use"
            raise DataSourceError(f"agl_max_staleness {self._max_staleness}: {asks}; set {behind} or more")

    def admitted(self, group_ids: Iterable[str]) -> None:
        if self.on:
            self._admit(group_ids)

    def finalized(self, group: GroupResult) -> None:
        number = self._under_way.pop(group.group_id, None)
        if number is not None and group.ready:
            self._ready[group.succeeded[0].rollout_id] = number
            self._admission.end(number)
        elif number is not None:
            self._admission.replace(number)

    def lost(self) -> None:
        """What is under way will not end, and is admitted again."""
        for number in self._under_way.values():
            self._admission.replace(number)
        self._under_way.clear()

    def reconciled(self, under_way: Iterable[str]) -> None:
        """After a loaded state the store has these groups under way, and no others."""
        found = [*under_way]
        for name in [*self._under_way.keys() - {*found}]:
            self._admission.replace(self._under_way.pop(name))
        self._before = [one for one in self._before if one[2] or one[0] in found]
        if self.on:
            self._admit(name for name in found if name not in self._under_way)
        else:
            known = {name for name, *_ in self._before}
            self._before += [(name, _NOW, False) for name in found if name not in known]

    @property
    def free(self) -> int:
        """Groups that may be enqueued now."""
        return self._admission.free

    def deliverable(self, ready: Iterable[Sequence[Sample]]) -> int:
        """How many of the groups that are ready may be delivered; those that were given back always."""
        return sum(_name(group) not in self._ready for group in ready) + self._admission.available

    def take(self, ready: deque[list[Sample]], n: int) -> int:
        """Put up to ``n`` groups that may be delivered in front, those that were given back first; returns how many."""
        n = min(n, self.deliverable(ready))
        ordered = sorted(ready, key=lambda group: self._ready.get(_name(group), -1))
        ready.clear()
        ready.extend(ordered)
        fresh = [name for group in ordered[:n] if (name := _name(group)) in self._ready]
        self._admission.take(len(fresh))
        for name in fresh:
            del self._ready[name]
        return n

    def rejected(self, groups: int) -> None:
        """So many that were delivered are not trained on."""
        if self.on:
            self._admission.reject(groups)

    def state(self) -> list[tuple[str, int]]:
        """Groups that are under way or ready, oldest first, and at which step each was admitted."""
        steps = self._admission.state()
        named = sorted({**self._under_way, **self._ready}.items(), key=itemgetter(1))
        return [(name, steps[str(number)]) for name, number in named]

    def restore(
        self, state: Iterable[tuple[str, int]], *, ready: Iterable[Sequence[Sample]], under_way: Iterable[str]
    ) -> None:
        """Go on with these groups, which the data source has restored."""
        steps, ended = dict(state), {_name(group): True for group in ready}
        named = {**dict.fromkeys(under_way, False), **ended}
        known = [(name, at, named[name]) for name, at in steps.items() if name in named]
        self._before = [*known, *((name, _NOW, is_ready) for name, is_ready in named.items() if name not in steps)]

    def _admit(self, names: Iterable[str], at: int | None = None) -> int:
        for name in names:
            self._under_way[name], self._next = self._next, self._next + 1
            self._admission.admit(self._under_way[name], at=at)
        return self._next - 1


def _name(group: Sequence[Sample]) -> str:
    return (rollout_of(group[0]) if group else None) or ""
