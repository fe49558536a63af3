"""How far rollouts may run ahead of training, and which groups are trained on next: the arithmetic of bounded
staleness, without threads, stores or clocks.

Groups are named by whole numbers in the order in which their tasks were drawn. Training consumes ``batch_size`` of them
per step, so the ``k``-th group that is taken (from 0) is trained on by weights of ``k // batch_size`` steps. One that
was admitted when the weights in use were those of ``s`` steps may be trained on by weights of ``s + max_staleness``
steps at the latest: its tokens are then at most ``max_staleness`` versions behind.
"""

from __future__ import annotations

from collections.abc import Mapping

from agl_slime.errors import ConfigError


class Admission:
    """Admits groups, and says which may be trained on, so that none is ever too old and none is thrown away.

    In all, ``(step + max_staleness + 1) * batch_size`` groups may have been admitted, and never more than ``last_step``
    steps use up. Finished groups are trained on in the order of admission, unless taking one would push an unfinished
    group past the staleness limit; by the rule of admission that passes as soon as the unfinished group has ended. The
    order is not that of the numbers where a resumed run draws tasks again that had been dropped before.
    """

    def __init__(self, *, batch_size: int, max_staleness: int, step: int = 0, last_step: int | None = None) -> None:
        self.step = step
        """Steps whose weights are in use; goes up only."""
        self.taken = step * batch_size
        """Groups that were taken to be trained on."""
        self.batch: dict[int, int] = {}
        """What was taken last, with the step at which each was admitted."""
        self._batch_size, self._max_staleness, self._last_step = batch_size, max_staleness, last_step
        self._in_flight: dict[int, int] = {}  # with the step at which each was admitted
        self._ended: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Groups that may be admitted now."""
        steps = self.step + self._max_staleness + 1
        if self._last_step is not None:
            steps = min(steps, self._last_step)
        return steps * self._batch_size - self.taken - len(self._in_flight) - len(self._ended)

    @property
    def in_flight(self) -> int:
        """Groups that have not ended."""
        return len(self._in_flight)

    @property
    def available(self) -> int:
        """Groups that have ended and may be trained on now."""
        room = len(self._ended)
        for place, number in enumerate(_by_age(self._in_flight)):
            # it comes behind all that is taken before it ends, and behind the older ones in flight
            last = (self._in_flight[number] + self._max_staleness + 1) * self._batch_size - 1
            room = min(room, last - self.taken - place)
        return max(0, room)

    def admit(self, number: int, *, at: int | None = None) -> None:
        """This group is in flight; it was admitted at step ``at`` where a restart lies between."""
        self._in_flight[number] = self.step if at is None else at

    def end(self, number: int) -> None:
        """This group can be trained on, or takes up its place in a batch without having come to anything."""
        self._ended[number] = self._in_flight.pop(number)

    def replace(self, number: int) -> None:
        """This group came to nothing: another may be admitted in its place."""
        if self._in_flight.pop(number, None) is None:
            del self._ended[number]

    def take(self, n: int | None = None) -> list[int] | None:
        """The oldest ``n`` groups (a batch by default) that have ended, to be trained on; ``None`` while so many are
        not available."""
        n = self._batch_size if n is None else n
        if self.available < n:
            return None
        self.batch = {number: self._ended.pop(number) for number in _by_age(self._ended)[:n]}
        self.taken += n
        return [*self.batch]

    def reject(self, n: int) -> None:
        """So many that were taken are not trained on: others may be in their places."""
        self.taken -= n

    def advance(self, step: int | None = None) -> None:
        """The weights of ``step`` steps, by default of one more, are in use."""
        self.step = max(self.step, self.step + 1 if step is None else step)

    def state(self) -> dict[str, int]:
        """For each group that was not taken, by its number as text, the step at which it was admitted."""
        return {str(number): at for number, at in sorted({**self._in_flight, **self._ended}.items())}

    def check(self, *, cut_off: Mapping[str, int] | None = None) -> None:
        """Raise ``ConfigError`` when groups that were admitted before a restart, those among them that it has
        ``cut_off`` and that are admitted again, cannot all be trained on in time, or are more than may be admitted:
        the limit was a higher one then."""
        again = {int(number): at for number, at in (cut_off or {}).items()}
        held = len(again) + len(self._in_flight) + len(self._ended)
        if self.free < len(again) or self.late(again):
            why = f"the checkpoint holds {held} groups that were admitted under a higher limit"
            raise ConfigError(f"max_staleness {self._max_staleness}: {why}; resume with the limit of its run")

    def late(self, again: Mapping[int, int] | None = None) -> bool:
        """Whether some of the groups, and of those that are admitted ``again``, cannot be trained on in time."""
        known = {**(again or {}), **self._in_flight, **self._ended}
        turns = ((known[n], (self.taken + place) // self._batch_size) for place, n in enumerate(_by_age(known)))
        return any(turn - at > self._max_staleness for at, turn in turns)


def _by_age(admitted: Mapping[int, int]) -> list[int]:
    """The groups in the order of admission, those of one step in the order of their numbers."""
    return sorted(admitted, key=lambda number: (admitted[number], number))
