"""The plan of runners, one word on the command line."""

from __future__ import annotations

import sys

import pytest

from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.runner.base import RunnerPlan
from agl_slime.runner.make import make_runners
from agl_slime.store.bridge import BridgeStore
from tests.runner.function_agents import FnAgent


@pytest.mark.parametrize(("text", "kind", "count"), [("inproc", "inproc", 1), ("process:16", "process", 16)])
def test_a_plan_is_read_and_written(text: str, kind: str, count: int) -> None:
    plan = RunnerPlan.parse(text)
    assert (plan.kind, plan.count) == (kind, count)
    assert str(plan) == text


@pytest.mark.parametrize("text", ["", "process", "process:", "process:0", "inproc:1", "thread:2", "ray:1.5", "ray:²"])
def test_invalid_plan_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="expected inproc, controller, process:N or ray:N"):
        RunnerPlan.parse(text)


def test_ray_that_is_not_installed_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match="pip install"):
        make_runners(RunnerPlan("ray", 2), agent=FnAgent(float), store=BridgeStore())
