"""metrics.jsonl after a kill, a NaN and a resume; TensorBoard files and the closing summary."""

import io
import json
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
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
from agl_slime.metric_names import REQUIRED_KEYS
from agl_slime.report import MetricsWriter, RunDir, StandardReporters, TensorBoardWriter, open_run_dir, read_metrics
from agl_slime.report.files import cut
from agl_slime.report.summary import ModelOfRun
from agl_slime.tools.audit.readers import broken_lines
from tests.report.cases import METRICS, row


def write(
    path: Path,
    *iterations: int,
    warnings: list[tuple[str, str]] | None = None,
    metrics: Mapping[str, MetricValue] | None = None,
) -> None:
    heard = [] if warnings is None else warnings
    writer = MetricsWriter(path, warn=lambda text, key: heard.append((text, key)))
    for iteration in iterations:
        writer.handle(IterationFinished(iteration=iteration, metrics={**METRICS, **(metrics or {})}))
    writer.close()


def reject_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_one_valid_object_per_iteration_with_the_required_keys(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    write(path, 1, 2, 3)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3]
    assert json.loads(lines[0]) == {"iteration": 1, **METRICS, "crc": zlib.crc32(lines[0].split(', "crc"')[0].encode())}
    content = path.read_bytes()
    writer = MetricsWriter(path, warn=lambda text, key: None)
    assert path.read_bytes() == content  # opening changes nothing
    writer.handle(IterationFinished(iteration=4, metrics={"val/reward_mean": 0.25}))
    writer.close()
    assert read_metrics(path)[-1] == {"iteration": 4, "val/reward_mean": 0.25, **dict.fromkeys(REQUIRED_KEYS)}


def test_values_are_plain_numbers_or_null_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    scalars = {"train/loss": np.float32(0.5), "rollout/count": np.int64(3), "train/grad_norm": np.array(2.0)}
    write(path, 1, metrics=scalars)
    for value, word in ((math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite")):
        warnings: list[tuple[str, str]] = []
        cut(1, path)
        write(path, 7, warnings=warnings, metrics={"train/loss": value})
        text = f"train/loss is {word} in iteration 7; metrics.jsonl has null there."
        assert warnings == [(text, "not_finite:train/loss")]
        first, second = (json.loads(line, parse_constant=reject_constant) for line in path.read_text().splitlines())
        assert second["train/loss"] is None
    assert (first["train/loss"], first["rollout/count"], first["train/grad_norm"]) == (0.5, 3, 2.0)


def test_torn_and_broken_lines_are_read_over_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    whole = path.read_bytes()
    for end in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:end])
        assert [row["iteration"] for row in read_metrics(path)] == [1]
    write(path, 2, 3)  # after the torn line
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"{nothing\n", *lines[2:]]))
    write(path, 4)
    assert [row["iteration"] for row in read_metrics(path)] == [1, 3, 4]
    assert path.read_bytes().splitlines()[1] == b"{nothing"  # stays for people to read
    assert "line 2 is not JSON" in caplog.text


def test_resume_after_a_torn_line_leaves_no_duplicate_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3, 4)
    path.write_bytes(path.read_bytes()[:-20])
    cut(2, path)
    write(path, 3, 4, 5, metrics={"train/loss": 9.0})
    losses = {row["iteration"]: row["train/loss"] for row in read_metrics(path)}
    assert losses == {1: -0.012, 2: -0.012, 3: 9.0, 4: 9.0, 5: 9.0}
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@given(st.lists(st.integers(0, 8), min_size=1, max_size=12), st.booleans())
def test_the_file_always_holds_each_iteration_once_in_order(tmp_path_factory, iterations, resumed):
    """An append that is not after the last one is refused, and only a resume makes room for it."""
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    expected: list[int] = []
    for iteration in iterations:
        if resumed:
            cut(iteration - 1, path)
            expected = [earlier for earlier in expected if earlier < iteration]
        if expected and iteration <= expected[-1]:
            content = path.read_bytes()
            with pytest.raises(ValueError, match=f"has records of iteration {expected[-1]} already; iteration"):
                write(path, iteration)
            assert path.read_bytes() == content
        else:
            write(path, iteration)
            expected.append(iteration)
    assert [row["iteration"] for row in read_metrics(path)] == expected
    assert [*broken_lines(path)] == []


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
