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
    first, second = (gpu.trainer_row(options(tmp_path), Path(LOOKUP_POLICY)) for _ in range(2))
    assert first["loss"] == pytest.approx(second["loss"], abs=1e-6)
    assert first["loss"] != 0.0  # policies are not equal
    gpu.check_log_probs(second, "float32")
    assert second["difference_max"] < 1e-6
    assert "failed" not in second
    for difference in (0.6, float("nan")):
        row = {"row": "trainer, cuda bfloat16", "difference_max": difference}
        gpu.check_log_probs(row, "bfloat16")
        assert row["failed"]


def test_each_row_without_a_card_or_time_says_so(tmp_path: Path) -> None:
    late = gpu.Budget(0.0, time.monotonic())
    _, missing = gpu.describe("cuda:99")
    sections = (gpu.trainer, gpu.calls, gpu.loop)
    rows = [row for run in sections for row in run(options(tmp_path), Path(LOOKUP_POLICY), late, missing)]
    assert len(rows) == 9
    assert all(row["not run"] and "failed" not in row for row in rows)
