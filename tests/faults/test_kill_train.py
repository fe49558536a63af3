"""A short run of ``tests/faults/kill_train.py``; its 50 kills take some minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kill_train import run

pytest.importorskip("torch", reason="needs agl-slime[local]")


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_no_task_is_lost_or_trained_on_twice_when_train_is_killed(tmp_path: Path, max_staleness: int) -> None:
    result = run(tmp_path, kills=4, seed=3, limit_s=300, max_staleness=max_staleness)
    assert (result.lost, result.twice, result.leftovers) == ([], [], [])
    assert result.optimizer_steps[0] == result.optimizer_steps[1] > 0
    assert result.adds_up
    assert result.reports_in_order
    assert result.kills_while_training >= 1
