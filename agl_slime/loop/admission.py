"""How far rollouts may run ahead of training, and which groups are trained on next: the arithmetic of bounded
staleness, without threads, stores or clocks.

Groups are named by whole numbers in the order in which their tasks were drawn. Training consumes ``batch_size`` of them
per step. A group that was admitted after ``s`` steps may be trained on up to step ``s + 1 + max_staleness``: its tokens
are then sampled by weights at most ``max_staleness`` versions behind those that train on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from agl_slime.errors import ConfigError


@dataclass(slots=True)
class _Place:
    admitted: int  # steps that had been made then
    ended: bool = False


class Admission:
    """Admits groups and makes batches of them so that none is ever too old, and none is thrown away.

    In all, ``(steps + max_staleness + 1) * batch_size`` groups may have been admitted, and never more than
    ``last_step`` steps use up. Of those that have ended the oldest go first. A batch is held back while one that has
    not ended has to be in it, or could not be trained on in time any more after it; by the rule of admission that
    passes as soon as those have ended.
    """

    def __init__(self, *, batch_size: int, max_staleness: int, step: int = 0, last_step: int | None = None) -> None:
        self.step = step
        """Steps that training has made."""
        self._batch_size, self._max_staleness, self._last_step = batch_size, max_staleness, last_step
        self._places: dict[int, _Place] = {}
        self._ended = 0
        self._training = 0

    @property
    def free(self) -> int:
        """Groups that may be admitted now."""
        steps = self._max_staleness + 1
        if self._last_step is not None:
            steps = min(steps, self._last_step - self.step)
        return steps * self._batch_size - len(self._places) - self._training

    @property
    def in_flight(self) -> int:
        """Groups that have not ended."""
        return len(self._places) - self._ended

    def admit(self, number: int, *, at: int | None = None) -> None:
        """This group is in flight; it was admitted after ``at`` steps where a restart lies between."""
        self._places[number] = _Place(self.step if at is None else at)

    def end(self, number: int) -> None:
        """This group can be trained on, or takes up its place in a batch without having come to anything."""
        place = self._places[number]
        self._ended += not place.ended
        place.ended = True

    def replace(self, number: int) -> None:
        """This group came to nothing: another may be admitted in its place."""
        self._ended -= self._places.pop(number).ended

    def take(self) -> list[int] | None:
        """The groups of the next step, oldest first, if it can be made now. ``advance`` has to follow."""
        if self._ended < self._batch_size:
            return None
        order = sorted(self._places)
        batch = [number for number in order if self._places[number].ended][: self._batch_size]
        taken = {*batch}
        if self._late([number for number in order if number not in taken], self.step + 1):
            return None
        for number in batch:
            del self._places[number]
        self._ended -= self._batch_size
        self._training = self._batch_size
        return batch

    def advance(self) -> None:
        """The step of the batch that was taken has been made, and its weights are in use."""
        self.step += 1
        self._training = 0

    def state(self) -> dict[str, int]:
        """For each group that is not trained on, by its number as text, the steps after which it was admitted."""
        return {str(number): place.admitted for number, place in sorted(self._places.items())}

    def check(self) -> None:
        """Raise ``ConfigError`` when groups that were admitted before a restart cannot all be trained on in time, or
        are more than may be admitted: the limit was a higher one then."""
        if self.free < 0 or self._late(sorted(self._places), self.step):
            why = f"the checkpoint holds {len(self._places)} groups that were admitted under a higher limit"
            raise ConfigError(f"max_staleness {self._max_staleness}: {why}; go on with the one that it was saved under")

    def _late(self, order: list[int], step: int) -> int:
        """How many groups are too old when ``order`` is trained on after ``step`` steps."""
        turns = (
            (self._places[number].admitted, step + place // self._batch_size) for place, number in enumerate(order)
        )
        return sum(turn - admitted > self._max_staleness for admitted, turn in turns)
