"""TensorBoard files and the closing summary, written by the standard reporters of a run directory."""

from __future__ import annotations

import io
import json
import math
import os
from pathlib import Path

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
from agl_slime.report.summary import ModelOfRun, sum_up, summary_rows
from tests.report.cases import hide, row

# -- TensorBoard ------------------------------------------------------------------------------------------------------


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
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 2.0),
        (4, 2.0),
    ]


# -- the summary -----------------------------------------------------------------------------------------------------


def run(directory: RunDir, *, iterations: int = 3, reason: str = "finished", ledger: bool = False) -> str:
    out = io.StringIO()
    with StandardReporters(directory, console=Console(file=out), view="lines", began=100.0) as reporters:
        assert json.loads(directory.alive.read_bytes())["pid"] == os.getpid()  # until all is written
        reporters.handle(RunStarted(settings={}, num_iterations=iterations))
        for iteration in range(1, iterations + 1):
            began = 100.0 + 10 * iteration
            reporters.handle(PhaseStarted(iteration=iteration, phase="collect", at=began))
            for number in range(4):
                failed = number == 3
                reporters.handle(
                    RolloutFinished(
                        iteration=iteration,
                        rollout_id=str(number),
                        outcome="failed" if failed else "succeeded",
                        reason="timeout" if failed else "",
                    )
                )
            reporters.handle(PhaseStarted(iteration=iteration, phase="train", at=began + 6))
            metrics = row(
                iteration * 10, **{"rollout/count": 4, "rollout/failed": 1, "train/logprob_diff_max": iteration * 1e-6}
            )
            reporters.handle(IterationFinished(iteration=iteration, metrics=metrics))
        reporters.handle(Warning(text="odd", key="odd"))
        reporters.handle(Warning(text="odd", key="odd"))
        summary = {"ledger": {"opened": 12, "open": 0, "trained": 9, "failed": 3}} if ledger else {}
        reporters.handle(RunFinished(reason=reason, at=140.0, summary=summary))
    assert not directory.alive.exists()
    return out.getvalue()


def test_closing_summary_has_outcomes_counts_and_paths(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    directory = open_run_dir(tmp_path / "run", agent="a", settings={})
    lines = run(directory).splitlines()
    shown = [tuple(line.split("  ", 1)) for line in lines[lines.index("") + 1 :]]
    assert [(label, text.strip()) for label, text in shown] == [
        ("run", "finished"),
        ("iterations", "3"),
        ("reward", "0.076 -> 0.924  (best 0.924 in iteration 3)"),
        ("rollouts", "succeeded 9, failed 3"),
        ("failures", "timeout 3"),
        ("tokens", "300 sampled under mask, 300 trained: equal"),
        ("log-prob difference", "1.0e-06 at most between trainer and engine, first batch"),
        ("first ratio", "within 3.0e-06 of 1"),
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


def test_ledger_counts_replace_those_of_events(tmp_path: Path) -> None:
    text = run(open_run_dir(tmp_path / "run", agent="a", settings={}), ledger=True)
    assert "12 enqueued: trained 9, failed 3" in text
    assert "succeeded" not in text


def test_a_resumed_run_is_summed_up_as_a_whole(tmp_path: Path) -> None:
    run(open_run_dir(tmp_path / "run", agent="a", settings={}), iterations=2, reason="interrupted")
    directory = open_run_dir(tmp_path / "run", agent="a", settings={}, resume=True)
    directory.rewind(0)
    run(directory, iterations=4)
    summary = json.loads(directory.summary.read_text())
    assert (summary["iterations"], summary["rollouts"], summary["tokens_trained"]) == (4, 16, 400)


def test_unequal_token_counts_and_the_reason_of_a_stop_are_shouted() -> None:
    rows = dict(
        summary_rows({"reason": "every rollout failed", "iterations": 1, "tokens_under_mask": 10, "tokens_trained": 9})
    )
    assert rows["tokens"] == "10 sampled under mask, 9 trained: NOT EQUAL"
    assert rows["run"] == "stopped: every rollout failed"
    only = dict(summary_rows({"reason": "finished", "iterations": 1, "tokens_under_mask": 10, "tokens_trained": None}))
    assert only["tokens"] == "10 sampled under mask, none reported as trained"
    none = dict(summary_rows({"reason": "stopped", "iterations": 1, "tokens_under_mask": 0, "tokens_trained": None}))
    assert none["tokens"] == "0 sampled under mask, nothing was trained"


def test_validation_first_and_last_and_nothing_invented() -> None:
    total = sum_up(
        [
            {"iteration": 1, "val/start_reward_mean": 0.1},
            {"iteration": 2},
            {"iteration": 3, "val/start_reward_mean": 0.5, "val/reward_mean": 0.6},
        ]
    )
    assert (total["val_first"], total["val_last"]) == (0.1, 0.6)
    assert (
        total["reward_first"]
        is total["tokens_trained"]
        is total["logprob_diff_first"]
        is total["first_ratio_dev_max"]
        is None
    )


def test_missing_tensorboard_is_named_in_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "tensorboard")
    directory = open_run_dir(tmp_path / "run", agent="a", settings={})
    text = run(directory)
    assert 'TensorBoard is not installed; pip install "agl-slime[report]"' in text
    assert not directory.tensorboard.exists()


def test_a_run_that_failed_at_once_still_gets_its_summary(tmp_path: Path) -> None:
    directory = open_run_dir(tmp_path / "run", agent="a", settings={})
    text = run(directory, iterations=0, reason="SGLang is not reachable at http://127.0.0.1:1; start it")
    assert "stopped: SGLang is not reachable" in text
    assert json.loads(directory.summary.read_text())["iterations"] == 0


def test_unwritable_metrics_are_reported_and_the_run_continues(tmp_path: Path) -> None:
    directory = open_run_dir(tmp_path / "run", agent="a", settings={})
    directory.metrics.symlink_to(tmp_path / "gone" / "metrics.jsonl")  # so that the file cannot be opened
    text = run(directory)
    assert "iter 3/3" in text
    assert "MetricsWriter stopped with FileNotFoundError" in text
    assert json.loads(directory.summary.read_text())["outcomes"] == {"succeeded": 9, "failed": 3}
