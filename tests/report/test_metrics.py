"""metrics.jsonl: what a kill, a NaN and a resumed run leave in it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_slime.events import IterationFinished, MetricValue
from agl_slime.metric_names import REQUIRED_KEYS
from agl_slime.report import MetricsWriter, read_metrics
from agl_slime.report.audit.records import broken_lines
from agl_slime.report.files import cut
from tests.report.cases import METRICS


def write(
    path: Path,
    *iterations: int,
    warnings: list[tuple[str, str]] | None = None,
    metrics: Mapping[str, MetricValue] | None = None,
) -> None:
    told = [] if warnings is None else warnings
    writer = MetricsWriter(path, warn=lambda text, key: told.append((text, key)))
    for iteration in iterations:
        writer.handle(IterationFinished(iteration=iteration, metrics={**METRICS, **(metrics or {})}))
    writer.close()


def reject_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_one_valid_object_per_iteration(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    write(path, 1, 2, 3)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3]
    assert json.loads(lines[0]) == {"iteration": 1, **METRICS, "crc": zlib.crc32(lines[0].split(', "crc"')[0].encode())}


def test_required_keys_are_there_even_when_the_run_does_not_know_them(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, warn=lambda text, key: None)
    writer.handle(IterationFinished(iteration=0, metrics={"val/reward_mean": 0.25}))
    (row,) = read_metrics(path)
    assert row == {"iteration": 0, "val/reward_mean": 0.25, **dict.fromkeys(REQUIRED_KEYS)}
    writer.close()


@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite")])
def test_values_that_are_not_finite_become_null_and_are_reported(tmp_path: Path, value: float, word: str) -> None:
    path = tmp_path / "metrics.jsonl"
    warnings: list[tuple[str, str]] = []
    write(path, 7, warnings=warnings, metrics={"train/loss": value})
    row = json.loads(path.read_text(), parse_constant=reject_constant)
    assert row["train/loss"] is None
    assert warnings == [
        (f"train/loss is {word} in iteration 7; metrics.jsonl has null there.", "not_finite:train/loss")
    ]


def test_numpy_scalars_are_written_as_numbers(tmp_path: Path) -> None:
    np = pytest.importorskip("numpy")
    path = tmp_path / "metrics.jsonl"
    write(
        path, 1, metrics={"train/loss": np.float32(0.5), "rollout/count": np.int64(3), "train/grad_norm": np.array(2.0)}
    )
    (row,) = read_metrics(path)
    assert (row["train/loss"], row["rollout/count"], row["train/grad_norm"]) == (0.5, 3, 2.0)


def test_a_torn_last_line_is_read_over_at_every_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        path.write_bytes(whole[:end])
        assert [row["iteration"] for row in read_metrics(path)] == [1]
    path.write_bytes(whole)
    assert [row["iteration"] for row in read_metrics(path)] == [1, 2]


def test_a_broken_line_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n{"iterat\n{"iteration": 3}\n')
    assert [row["iteration"] for row in read_metrics(path)] == [1, 3]
    assert "line 2 is not JSON" in caplog.text


def test_broken_line_does_not_stop_a_resumed_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"{nothing\n", *lines[2:]]))
    write(path, 4)
    assert [row["iteration"] for row in read_metrics(path)] == [1, 3, 4]
    assert path.read_bytes().splitlines()[1] == b"{nothing"  # for people to see what it was


def test_resume_after_a_torn_line_leaves_no_duplicate_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 2, 3, 4)
    path.write_bytes(path.read_bytes()[:-20])
    cut(2, path)
    write(path, 3, 4, 5, metrics={"train/loss": 9.0})
    rows = read_metrics(path)
    assert [(row["iteration"], row["train/loss"]) for row in rows] == [
        (1, -0.012),
        (2, -0.012),
        (3, 9.0),
        (4, 9.0),
        (5, 9.0),
    ]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_opening_without_writing_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1)
    before = path.read_bytes()
    MetricsWriter(path, warn=lambda text, key: None).close()
    assert path.read_bytes() == before


@given(st.lists(st.integers(0, 8), min_size=1, max_size=12), st.booleans())
def test_the_file_always_holds_each_iteration_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, iterations: list[int], resumed: bool
) -> None:
    """An append that is not after the last one is refused, and only a resume makes room for it."""
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    expected: list[int] = []
    for iteration in iterations:
        if resumed:
            cut(iteration - 1, path)
            expected = [known for known in expected if known < iteration]
        if expected and iteration <= expected[-1]:
            before = path.read_bytes()
            with pytest.raises(ValueError, match=f"has records of iteration {expected[-1]} already; iteration"):
                write(path, iteration)
            assert path.read_bytes() == before
        else:
            write(path, iteration)
            expected.append(iteration)
    assert [row["iteration"] for row in read_metrics(path)] == expected
    assert [*broken_lines(path)] == []


def test_handled_events_survive_sigkill(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = (
        "import sys, time\n"
        "from agl_slime.events import IterationFinished\n"
        "from agl_slime.report import Reporters, MetricsWriter\n"
        "class Says:\n"
        "    def handle(self, event): event.iteration == 50 and print('written', flush=True)\n"
        "reporters = Reporters([MetricsWriter(sys.argv[1], warn=print), Says()])\n"
        "for i in range(1, 51): reporters.handle(IterationFinished(iteration=i, metrics={'train/loss': i}))\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.send_signal(signal.SIGKILL)
    assert [row["iteration"] for row in read_metrics(path)] == list(range(1, 51))
