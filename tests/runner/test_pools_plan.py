"""Where runners run, in one word."""

from __future__ import annotations

import pytest

from agl_slime.errors import ConfigError
from agl_slime.runner.base import RunnerPlan


@pytest.mark.parametrize(
    ("text", "kind", "count"),
    [("inproc", "inproc", 1), ("process:1", "process", 1), ("process:16", "process", 16), ("ray:2", "ray", 2)],
)
def test_a_plan_is_read_and_written(text: str, kind: str, count: int) -> None:
    plan = RunnerPlan.parse(text)
    assert (plan.kind, plan.count) == (kind, count)
    assert str(plan) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "process",
        "process:",
        "process:0",
        "process:-1",
        "process:two",
        "inproc:1",
        "inproc:",
        "thread:2",
        "ray",
        "ray:1.5",
        "process:²",
    ],
)
def test_invalid_plan_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="expected inproc, controller, process:N or ray:N"):
        RunnerPlan.parse(text)
