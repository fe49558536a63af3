"""benchmarks/gpu.py on a machine without a card: its CPU rows are right, and the others say why they are not there."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pytest

from agl_slime.cli.demo import LOOKUP_POLICY
from benchmarks import gpu


def options(directory: Path, *, dtype: str = "float32") -> argparse.Namespace:
    return argparse.Namespace(
        model="lookup",
        device="cuda",
        rollouts=8,
        directory=directory,
        row=("cpu", dtype),
        iterations=1,
        sglang_url=None,
    )


def test_a_row_compares_with_the_log_probs_of_the_first_one(tmp_path: Path) -> None:
    first, again = (gpu.trainer_row(options(tmp_path), Path(LOOKUP_POLICY)) for _ in range(2))
    assert first["loss"] == pytest.approx(again["loss"], abs=1e-6)
    assert first["loss"] != 0.0  # the batch is not that of equal policies
    assert first["gradient"] > 0
    assert first["difference_max"] < 1e-6
    assert first["seconds"] > 0
    gpu.check_log_probs(again, "float32")
    assert "failed" not in again


@pytest.mark.parametrize("difference", [0.6, float("nan")])
def test_log_probs_beyond_the_bound_fail_the_row(difference: float) -> None:
    row = {"row": "trainer, cuda bfloat16", "difference_max": difference}
    gpu.check_log_probs(row, "bfloat16")
    assert row["failed"]


def test_each_row_without_a_card_or_time_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    late = gpu.Budget(0.0, time.monotonic())
    _, missing = gpu.describe("cuda:99")
    sections = (gpu.trainer, gpu.calls, gpu.loop)
    rows = [row for run in sections for row in run(options(tmp_path), Path(LOOKUP_POLICY), late, missing)]
    assert len(rows) == 9
    assert all(row["not run"] for row in rows)
    assert not any("failed" in row for row in rows)
    said = capsys.readouterr().out.splitlines()
    assert sum(": not run, torch sees no" in line for line in said) == 3
    assert sum(line.endswith("out of time") for line in said) == 4
