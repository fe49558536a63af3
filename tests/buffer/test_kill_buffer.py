"""A short run of ``tests/programs/kill_buffer.py``; its 50 kills take some minutes."""

from __future__ import annotations

import pytest

from tests.programs.kill_buffer import run


@pytest.mark.slow
def test_no_group_is_lost_or_trained_twice_when_processes_are_killed(tmp_path):
    result = run(tmp_path, kills=8, groups=200, seed=1, limit_s=240)
    assert (result.lost, result.twice) == ([], [])
    assert result.adds_up
    assert sum(result.kills.values()) >= 4
