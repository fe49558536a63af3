"""Whose fault it is when a batch has nothing but failures."""

from __future__ import annotations

import pytest

from agl_slime.data.results import GroupResult, MemberResult
from agl_slime.errors import LoopError
from agl_slime.loop.failures import Failures
from agl_slime.loop.settings import LoopSettings


def batch_of(*failures: str | None) -> list[GroupResult]:
    members = tuple(
        MemberResult(rollout_id=f"ro-{n}", group_id="g", failure=failure) for n, failure in enumerate(failures)
    )
    return [GroupResult(group_id="g", mode="train", size=2, members=members, ready=False, reason="incomplete")]


@pytest.mark.parametrize("failure", ["agent_lost", "controller_shutdown"])
def test_a_first_batch_that_a_controller_lost_is_tried_again(failure: str) -> None:
    judged = Failures(LoopSettings(failure_patience_s=60), worked=False)
    assert judged.pause_after(1, batch_of(failure, failure, "agent_failed")) is not None


def test_a_first_batch_that_the_agent_failed_ends_the_run() -> None:
    judged = Failures(LoopSettings(failure_patience_s=60), worked=False)
    with pytest.raises(LoopError, match="all 2 rollouts failed"):
        judged.pause_after(1, batch_of("agent_failed", "agent_failed"))


def test_without_patience_a_batch_that_a_controller_lost_ends_the_run() -> None:
    with pytest.raises(LoopError, match="agent_lost"):
        Failures(LoopSettings(failure_patience_s=0), worked=False).pause_after(1, batch_of("agent_lost"))
