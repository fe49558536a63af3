"""A short run of ``tests/programs/kill_runners.py``; its 50 kills take some minutes."""

from __future__ import annotations

import multiprocessing

import pytest

from tests.programs.kill_runners import run


@pytest.mark.slow
def test_killed_runner_processes_lose_no_group_and_train_none_twice():
    result = run(kills=3, seed=1)
    assert result.faults == []
    assert result.kills == 3
    assert result.counts["groups trained"] == result.counts["groups enqueued"] > 0
    assert multiprocessing.active_children() == []
