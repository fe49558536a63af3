"""Whether a run without usable rollouts ends, or pauses and tries again."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from agl_slime.data.results import GroupResult, MemberResult
from agl_slime.errors import LoopError
from agl_slime.loop.metrics import format_failures
from agl_slime.loop.settings import LoopSettings
from agl_slime.support.backoff import Backoff
from agl_slime.tokens.reward import OTHER_NAMES

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 60.0
# Failures without fault of the agent: its controller died, or ended it.
_CONTROLLER_FAILURES = frozenset({"agent_lost", "controller_shutdown"})


class Failures:
    """Judges each batch. If all rollouts fail and none ever succeeded, the agent is at fault and the run ends at once.
    If some succeeded before (``worked``), or a controller lost some, a dependency is unavailable, and the run tries
    again for ``failure_patience_s``. The run also ends after ``max_empty_iterations`` iterations in a row without a
    group to train on; pilots with equal rewards are no reason, as whole groups with equal rewards are none."""

    def __init__(self, settings: LoopSettings, *, worked: bool) -> None:
        self._settings, self._worked = settings, worked
        self._outage = Backoff(
            "no rollout succeeds any more",
            LoopError,
            base_s=_FIRST_PAUSE_S,
            cap_s=_LONGEST_PAUSE_S,
            patience_s=settings.failure_patience_s,
        )
        self._empty_in_a_row = 0
        self._rewarded, self._other_names = worked, ""
        self.why = ""
        """Message about the last batch whose rollouts all failed."""

    def note(self, member: MemberResult) -> None:
        """Note the end of a rollout: if the first reward has not the declared name, none will have it."""
        self._rewarded = self._rewarded or member.ok
        if member.failure == OTHER_NAMES and not self._rewarded:
            self._other_names = member.failure_message

    def raise_if_misnamed(self) -> None:
        """Raise ``LoopError`` when the first reward has not the name that the run is to train on."""
        if self._other_names:
            raise LoopError(f"{self._other_names}: declare one of these as the reward, or none for the first")

    def pause_after(self, iteration: int, groups: Sequence[GroupResult]) -> float | None:
        """The seconds to pause before another batch; ``None`` to continue with this one. Raises ``LoopError``."""
        members = [member for group in groups for member in group.members if not member.straggler]
        if not any(member.ok for member in members):
            self.why = f"iteration {iteration}: all {len(members)} rollouts failed: {format_failures(members)}"
            error = LoopError(self.why)
            may_recover = self._worked or any(member.failure in _CONTROLLER_FAILURES for member in members)
            if not (may_recover and self._settings.failure_patience_s):
                raise error
            if (pause_s := self._outage.failed(error)) is None:
                raise self._outage.given_up(error)
            return pause_s
        self._worked = True
        self._outage.reset()
        if any(group.ready or group.code == "pilot_equal" for group in groups):
            self._empty_in_a_row = 0
            return None
        self._empty_in_a_row += 1
        reasons = "; ".join(sorted({group.reason for group in groups}))
        if self._empty_in_a_row >= self._settings.max_empty_iterations:
            empty = f"no group was fit to train on in {self._empty_in_a_row} iterations in a row ({reasons})"
            raise LoopError(f"iteration {iteration}: {empty}; failures: {format_failures(members)}")
        logger.warning("Iteration %d: no group was fit to train on (%s).", iteration, reasons)
        return None
