"""The plan of runners, one word on the command line."""

from __future__ import annotations

import pytest

from agl_slime.errors import ConfigError
from agl_slime.runner.base import RunnerPlan


@pytest.mark.parametrize(("text", "kind", "count"), [("inproc", "inproc", 1), ("process:16", "process", 16)])
def test_a_plan_is_read_and_written(text: str, kind: str, count: int) -> None:
    plan = RunnerPlan.parse(text)
    assert (plan.kind, plan.count) == (kind, count)
    assert str(plan) == text


@pytest.mark.parametrize("text", ["", "process", "process:", "process:0", "inproc:1", "thread:2", "ray:1.5", "ray:²"])
def test_invalid_plan_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="expected inproc, controller, process:N or ray:N"):
        RunnerPlan.parse(text)
