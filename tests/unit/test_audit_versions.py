"""Which weights and which iteration a run may have begun with, by its metrics alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agl_slime.report.audit.agree import audit
from agl_slime.report.audit.figures import start_versions
from agl_slime.report.files import IterationFile


@pytest.mark.parametrize(
    ("first", "begun"),
    [
        ({"weights/version": "1"}, {"0": 0}),
        ({"weights/version": 2}, {"0": 0, "1": 0}),  # slime brings its weights to the engines before the first step
        ({"weights/version": "1", "train/short_batch": 3.0}, {"0": 0, "1": 0}),
        ({"weights/version": "1", "train/waiting_groups": 3.0}, {"0": 0, "1": 0}),
        ({"weights/version": "named"}, {"0": 0}),
    ],
)
def test_a_run_of_slimes_begins_with_version_1(first: dict[str, object], begun: dict[str, int]) -> None:
    later = {"iteration": 2, "weights/version": "9"}
    assert start_versions([later, {"iteration": 1, **first}]) == begun
    assert start_versions([]) == {"0": 0}


@pytest.mark.parametrize(("slimes", "missing"), [(True, [6]), (False, [1, 2, 3, 4, 6])])
def test_only_slime_runs_may_continue_from_another_directory(tmp_path: Path, slimes: bool, missing: list[int]) -> None:
    file = IterationFile(tmp_path / "metrics.jsonl")
    for iteration in (5, 7):
        more = {"train/slime_rollout_id": iteration - 1.0} if slimes else {}
        file.append(iteration, [{"weights/version": str(iteration), **more}])
    said = [f"metrics.jsonl: there is no line of iteration {iteration}" for iteration in missing]
    summary = {"reason": "finished", "iterations": 3 if slimes else 7}  # of this life; of all lives
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert [one for one in audit(tmp_path).findings if "there is no line" in one] == said
    assert not [one for one in audit(tmp_path).findings if "iterations" in one]
