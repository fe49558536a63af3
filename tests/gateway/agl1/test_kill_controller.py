"""Controllers, agents and runs of ``tests/programs/kill_controller.py`` are killed."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from agl_slime.gateway.agl1.settings import PYTHON_VARIABLE

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="needs agl-slime[local]"),
    pytest.mark.controller,
    pytest.mark.skipif(not os.environ.get(PYTHON_VARIABLE), reason=f"{PYTHON_VARIABLE} names no Python of 1.x"),
]


def test_killed_controllers_and_agents_lose_and_repeat_no_rollout(tmp_path: Path) -> None:
    from tests.programs.kill_controller import run

    result = run(tmp_path, rollouts=40, kills=4, seed=2, limit_s=300, batch=2)
    assert result.wrong == []
    assert sum(result.kills.values()) == 4
    assert result.trained > 0


@pytest.mark.parametrize("outside", [False, True])
def test_killed_run_resumes_with_the_same_or_another_controller(tmp_path: Path, outside: bool) -> None:
    """``outside``: the controller was started by hand and lives on; agents that it runs then are of no rollout."""
    from tests.programs.kill_controller import run

    result = run(tmp_path, rollouts=64, kills=0, seed=2, limit_s=600, train_kills=2, outside=outside)
    assert result.wrong == []
    assert result.kills["train"] == 2
    assert result.trained > 0
