"""benchmarks/gpu.py on a machine without a card: its CPU rows are right, and the others say why they are not there."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from agl_slime.cli.demo import LOOKUP_POLICY
from benchmarks import gpu


def test_a_row_that_differs_from_the_first_one_fails() -> None:
    for difference, failed in ((0.6, True), (float("nan"), True), (1e-3, False)):
        row = {"row": "trainer, cuda bfloat16", "difference_max": difference}
        gpu.check_log_probs(row, "bfloat16")
        assert ("failed" in row) is failed


def test_each_row_without_a_card_or_time_says_so(tmp_path: Path) -> None:
    late = gpu.Budget(0.0, time.monotonic())
    _, missing = gpu.describe("cuda:99")
    sections = (gpu.trainer, gpu.calls, gpu.loop)
    about = {"model": "lookup", "device": "cuda", "rollouts": 8, "iterations": 1, "sglang_url": None}
    options = argparse.Namespace(**about, directory=tmp_path, row=("cpu", "float32"))
    rows = [row for run in sections for row in run(options, Path(LOOKUP_POLICY), late, missing)]
    assert len(rows) == 9
    assert all(row["not run"] and "failed" not in row for row in rows)
