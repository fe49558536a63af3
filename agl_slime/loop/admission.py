"""Bounded staleness: how far rollouts may run ahead of training, and which groups are trained on next. Pure arithmetic,
without threads, stores or clocks.

Groups are numbered in the order in which their tasks were drawn. Training consumes ``batch_size`` groups per step, so
weights after ``k // batch_size`` steps train on the ``k``-th group taken (from 0). A group that was admitted after
``s`` steps may be trained on after at most ``s + max_staleness`` steps: its tokens are then at most ``max_staleness``
versions behind."""

from __future__ import annotations

from collections.abc import Mapping

from agl_slime.errors import ConfigError


class Admission:
    """Admits groups, and decides which may be trained on, so that no group is ever too old and none is thrown away.

    At most ``(step + max_staleness + 1) * batch_size`` groups are admitted in total, and never more than ``last_step``
    steps consume. Finished groups are trained on in the order of admission, unless taking one would push an unfinished
    group past the staleness limit; the admission limit guarantees that this wait ends with the unfinished group. A
    resumed run may admit groups out of the order of their numbers, as it draws dropped tasks again. With ``in_order``
    no finished group is taken before an unfinished older one.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        max_staleness: int,
        step: int = 0,
        last_step: int | None = None,
        in_order: bool = False,
    ) -> None:
        self.step = step
        """Training steps that the current weights have seen; never decreases."""
        self.taken = step * batch_size
        """The number of groups taken so far."""
        self.batch: dict[int, int] = {}
        """The groups taken last, each with its admission step."""
        self._batch_size, self._max_staleness, self._last_step = batch_size, max_staleness, last_step
        self._in_order = in_order
        self._in_flight: dict[int, int] = {}  # admission step of each group
        self._ended: dict[int, int] = {}

    @property
    def free(self) -> int:
        """The number of groups that may be admitted now."""
        steps = self.step + self._max_staleness + 1
        if self._last_step is not None:
            steps = min(steps, self._last_step)
        return steps * self._batch_size - self.taken - len(self._in_flight) - len(self._ended)

    @property
    def in_flight(self) -> int:
        """The number of unfinished groups."""
        return len(self._in_flight)

    @property
    def available(self) -> int:
        """The number of finished groups that may be trained on now."""
        if self._in_order:
            order = _by_age({**self._in_flight, **self._ended})
            return next((place for place, number in enumerate(order) if number in self._in_flight), len(order))
        available = len(self._ended)
        for older, number in enumerate(_by_age(self._in_flight)):
            # this group must be taken as number ``latest`` at most, after ``older`` unfinished groups
            latest = (self._in_flight[number] + self._max_staleness + 1) * self._batch_size - 1
            available = min(available, latest - self.taken - older)
        return max(0, available)

    def admit(self, number: int, *, step: int | None = None) -> None:
        """Put a group in flight; ``step``: its admission step before a restart, by default the current step."""
        self._in_flight[number] = self.step if step is None else step

    def end(self, number: int) -> None:
        """Move a group from in flight to finished. A dropped group also ends, and occupies a place in a batch."""
        self._ended[number] = self._in_flight.pop(number)

    def replace(self, number: int) -> None:
        """Remove a dropped group, so that another may be admitted."""
        if self._in_flight.pop(number, None) is None:
            del self._ended[number]

    def take(self, n: int | None = None) -> list[int] | None:
        """Take the oldest ``n`` finished groups (a batch by default) to train on; ``None`` while fewer are
        available."""
        n = self._batch_size if n is None else n
        if self.available < n:
            return None
        self.batch = {number: self._ended.pop(number) for number in _by_age(self._ended)[:n]}
        self.taken += n
        return [*self.batch]

    def reject(self, n: int) -> None:
        """Give back ``n`` taken groups that are not trained on: as many others may be taken."""
        self.taken -= n

    def advance(self, step: int | None = None) -> None:
        """Switch to the weights after ``step`` steps, by default after one more."""
        self.step = max(self.step, self.step + 1 if step is None else step)

    def state(self) -> dict[str, int]:
        """The admission step of each group that was not taken, by the group's number as text."""
        return {str(number): step for number, step in sorted({**self._in_flight, **self._ended}.items())}

    def check(self, *, interrupted: Mapping[str, int] | None = None) -> None:
        """Raise ``ConfigError`` when restored groups, with ``interrupted`` groups that are admitted again, exceed the
        limits: the checkpoint was made under a higher one."""
        readmitted = {int(number): step for number, step in (interrupted or {}).items()}
        total = len(readmitted) + len(self._in_flight) + len(self._ended)
        if self.free < len(readmitted) or self.late(readmitted):
            why = f"the checkpoint holds {total} groups that were admitted under a higher limit"
            raise ConfigError(f"max_staleness {self._max_staleness}: {why}; resume with the limit of its run")

    def late(self, readmitted: Mapping[int, int] | None = None) -> bool:
        """Whether some group, or some ``readmitted`` group, cannot be trained on within the staleness limit."""
        admitted = {**(readmitted or {}), **self._in_flight, **self._ended}
        steps = ((admitted[n], (self.taken + place) // self._batch_size) for place, n in enumerate(_by_age(admitted)))
        return any(trained - step > self._max_staleness for step, trained in steps)


def _by_age(admitted: Mapping[int, int]) -> list[int]:
    """The groups by admission step, then by number."""
    return sorted(admitted, key=lambda number: (admitted[number], number))
