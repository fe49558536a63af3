"""When a run that gives nothing to train on ends, and when it waits and tries again."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from agl_slime.errors import LoopError
from agl_slime.groups.results import GroupResult
from agl_slime.loop.metrics import format_failures
from agl_slime.loop.settings import LoopSettings
from agl_slime.support.backoff import Backoff

logger = logging.getLogger(__name__)

# Pauses while all rollouts fail grow up to the second.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 60.0
# Failures that say nothing of the agent: the controller that ran it died, or ended it.
_OF_THE_CONTROLLER = frozenset({"agent_lost", "controller_shutdown"})


class Failures:
    """Judges each batch. Where all rollouts fail that never succeeded, the agent is at fault, and the run ends at once.
    Where they did before (``worked``), or a controller lost some of them, something that they need is away: the run
    waits for ``failure_patience_s``. It ends as well after ``max_empty_iterations`` in a row without a group to train
    on."""

    def __init__(self, settings: LoopSettings, *, worked: bool) -> None:
        self._settings, self._worked = settings, worked
        self._outage = Backoff(
            "no rollout has succeeded any more",
            LoopError,
            base_s=_FIRST_PAUSE_S,
            cap_s=_LONGEST_PAUSE_S,
            patience_s=settings.failure_patience_s,
        )
        self._empty_in_a_row = 0
        self.why = ""
        """The sentence on the last batch whose rollouts have all failed."""

    def pause_after(self, iteration: int, groups: Sequence[GroupResult]) -> float | None:
        """The seconds after which to try another batch; ``None`` when this one will do. Raises ``LoopError``."""
        members = [member for group in groups for member in group.members if not member.straggler]
        if not any(member.ok for member in members):
            self.why = f"iteration {iteration}: all {len(members)} rollouts failed: {format_failures(members)}"
            error = LoopError(self.why)
            away = self._worked or any(member.failure in _OF_THE_CONTROLLER for member in members)
            if not (away and self._settings.failure_patience_s):
                raise error
            if (pause_s := self._outage.failed(error)) is None:
                raise self._outage.given_up(error)
            return pause_s
        self._worked = True
        self._outage.reset()
        if any(group.ready for group in groups):
            self._empty_in_a_row = 0
            return None
        self._empty_in_a_row += 1
        reasons = "; ".join(sorted({group.reason for group in groups}))
        if self._empty_in_a_row >= self._settings.max_empty_iterations:
            empty = f"no group was fit to train on in {self._empty_in_a_row} iterations in a row ({reasons})"
            raise LoopError(f"iteration {iteration}: {empty}; failures: {format_failures(members)}")
        logger.warning("Iteration %d: no group was fit to train on (%s).", iteration, reasons)
        return None
