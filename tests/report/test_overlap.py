"""Rollouts and training side by side, as a person sees it."""

from __future__ import annotations

import pytest

from agl_slime.events import IterationFinished
from agl_slime.report.console import iteration_line
from agl_slime.report.summary import sum_up, summary_rows
from tests.report.cases import METRICS, row

SIDES = {
    "perf/roll_s": 0.9,
    "perf/train_s": 0.6,
    "perf/sync_s": 0.1,
    "perf/iteration_s": 1.0,
    "perf/trainer_waited": 0.3,
    "perf/engine_waited": 0.05,
    "perf/cpu_busy": 0.96,
    "rollout/staleness_mean": 0.5,
    "rollout/staleness_max": 2,
}


def test_the_line_of_an_iteration_says_how_long_each_side_waited() -> None:
    line = iteration_line(IterationFinished(iteration=3, metrics={**METRICS, **SIDES}), 10, {})
    assert "1.00 s  waited: training 30%, engine 5%  CPU 96%" in line
    assert "waited" not in iteration_line(IterationFinished(iteration=3, metrics=METRICS), 10, {})


def test_the_summary_has_speed_up_ceiling_and_staleness() -> None:
    summary = sum_up([{"iteration": n, **row(n, **SIDES)} for n in range(1, 4)])
    assert summary["speed_up"] == pytest.approx(1.6)
    assert summary["speed_up_ceiling"] == pytest.approx(1.6 / 1.0)
    rows = dict(summary_rows({"reason": "finished", **summary}))
    assert rows["overlap"] == "1.60x, at most 1.60x;  training waited 30%, the engine 5%"
    assert rows["shared CPU"].startswith("96% busy: rollouts and training slowed each other")
    with_room = sum_up([{"iteration": 1, **row(1, **{**SIDES, "perf/cpu_busy": 0.4})}])
    assert "shared CPU" not in dict(summary_rows({"reason": "finished", **with_room}))
    assert rows["staleness"] == "0.50 versions on average, 2 at most"
    in_turn = sum_up([{"iteration": 1, **row(1)}])
    assert "speed_up" not in in_turn
    assert "overlap" not in dict(summary_rows({"reason": "finished", **in_turn}))
