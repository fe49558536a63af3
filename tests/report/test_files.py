"""TensorBoard files and the closing summary, written by the standard reporters of a run directory."""

import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agl_slime.events import (
    IterationFinished,
    MetricValue,
    PhaseStarted,
    RolloutFinished,
    RunFinished,
    RunStarted,
    Warning,
)
from agl_slime.report import RunDir, StandardReporters, TensorBoardWriter, open_run_dir, read_metrics
from agl_slime.report.summary import ModelOfRun
from tests.report.cases import row


def test_tensorboard_reads_the_log_and_a_resumed_run_replaces_points(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for iterations, loss in (((1, 2, 3), 1.0), ((2, 3, 4), 2.0)):
        writer = TensorBoardWriter(tmp_path / "tb")
        for iteration in iterations:
            metrics: dict[str, MetricValue] = {"train/loss": loss, "train/bad": math.nan, "weights/version": "x"}
            writer.handle(IterationFinished(iteration=iteration, metrics=metrics))
        writer.close()
        # TensorBoard reads files in the order of their names: second, host, pid, number of the process's writers
        [newest] = (tmp_path / "tb").glob("events.*")
        newest.rename(newest.with_name(f"{iterations[0]}.tfevents"))
    events = accumulator.EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    points = {event.step: event.value for event in events.Scalars("train/loss")}
    assert points == {1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0}


def run(directory: RunDir, *, iterations: int = 3, reason: str = "finished", ledger: bool = False) -> str:
    out = io.StringIO()
    with StandardReporters(directory, console=Console(file=out), view="lines", began=100.0) as reporters:
        assert json.loads(directory.alive.read_bytes())["pid"] == os.getpid()  # until all is written
        reporters.handle(RunStarted(settings={}, num_iterations=iterations))
        for iteration in range(1, iterations + 1):
            began = 100.0 + 10 * iteration
            reporters.handle(PhaseStarted(iteration=iteration, phase="collect", at=began))
            for number in range(4):
                ending: Any = {"outcome": "failed", "reason": "timeout"} if number == 3 else {"outcome": "succeeded"}
                reporters.handle(RolloutFinished(iteration=iteration, rollout_id=str(number), **ending))
            reporters.handle(PhaseStarted(iteration=iteration, phase="train", at=began + 6))
            metrics = row(
                iteration * 10, **{"rollout/count": 4, "rollout/failed": 1, "train/logprob_diff_max": iteration * 1e-6}
            )
            reporters.handle(IterationFinished(iteration=iteration, metrics=metrics))
        for _ in range(2):
            reporters.handle(Warning(text="odd", key="odd"))
        summary = {"ledger": {"opened": 12, "open": 0, "trained": 9, "failed": 3}} if ledger else {}
        reporters.handle(RunFinished(reason=reason, at=140.0, summary=summary))
    assert not directory.alive.exists()
    return out.getvalue()


def test_closing_summary_has_outcomes_counts_and_paths(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    directory = open_run_dir(tmp_path / "run", agent="a", settings={})
    lines = run(directory).splitlines()
    closing = [tuple(line.split("  ", 1)) for line in lines[lines.index("") + 1 :]]
    assert [(label, text.strip()) for label, text in closing] == [
        ("run", "finished"),
        ("result", "reward rose from 0.08 to 0.92 over 3 iterations; 25.0% of rollouts failed; no alarm"),
        ("reward", "0.076 -> 0.924  (best 0.924 in iteration 3)"),
        ("rollouts", "succeeded 9, failed 3"),
        ("failures", "timeout 3"),
        ("tokens", "300 sampled under mask, 300 trained: equal"),
        ("log-prob difference", "3.0e-06 at most between trainer and engine (iteration 3)"),
        ("first ratio", "within 3.0e-06 of 1 (iteration 1)"),
        ("samples", "3 forks, 0 retokenized"),
        ("wall time", "40.0 s  collect 18.0 s  train 12.0 s  start-up 10.0 s"),
        ("warning", "odd (x2)"),
        ("metrics", str(directory.metrics)),
        ("tensorboard", str(directory.tensorboard)),
        ("summary", str(directory.summary)),
        ("note", "no rollout was kept"),
        ("note", ModelOfRun(tmp_path).note),
    ]
    summary = json.loads(directory.summary.read_text())
    assert summary["tokens_under_mask"] == summary["tokens_trained"] == 300
    assert summary["outcomes"] == {"succeeded": 9, "failed": 3}
    assert summary["phase_s"] == {"start-up": 10.0, "collect": 18.0, "train": 12.0}
    assert len(read_metrics(directory.metrics)) == 3


def test_a_resumed_run_is_summed_up_as_a_whole(tmp_path: Path) -> None:
    run(open_run_dir(tmp_path / "run", agent="a", settings={}), iterations=2, reason="interrupted")
    directory = open_run_dir(tmp_path / "run", agent="a", settings={}, resume=True)
    directory.rewind(0)
    text = run(directory, iterations=4, ledger=True)
    summary = json.loads(directory.summary.read_text())
    assert (summary["iterations"], summary["rollouts"], summary["tokens_trained"]) == (4, 16, 400)
    assert "12 enqueued: trained 9, failed 3" in text  # from the ledger
    assert "succeeded" not in text


def test_a_run_that_fails_at_once_without_tensorboard_has_a_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agl_slime.report.metrics.find_spec", lambda name: None)
    directory = open_run_dir(tmp_path / "run", agent="a", settings={})
    text = run(directory, iterations=0, reason="SGLang is not reachable at http://127.0.0.1:1; start it")
    assert "stopped: SGLang is not reachable" in text
    assert 'TensorBoard is not installed; pip install "agl-slime[report]"' in text
    assert not directory.tensorboard.exists()
    assert json.loads(directory.summary.read_text())["iterations"] == 0
