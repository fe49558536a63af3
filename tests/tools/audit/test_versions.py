"""Weights and iterations at the start of a run, by its metrics alone."""

import json
import re
from pathlib import Path

import pytest

from agl_slime.report.files import IterationFile
from agl_slime.tools.audit.agree import audit
from agl_slime.tools.audit.figures import start_versions


def test_a_run_of_slimes_begins_with_version_1() -> None:
    """slime pushes weights before the first step."""
    later = {"iteration": 2, "weights/version": "9"}
    for first, versions in (
        ({"weights/version": "1"}, {"0": 0}),
        ({"weights/version": 2}, {"0": 0, "1": 0}),
        ({"weights/version": "1", "train/short_batch": 3.0}, {"0": 0, "1": 0}),
        ({"weights/version": "named"}, {"0": 0}),
    ):
        assert start_versions([later, {"iteration": 1, **first}]) == versions
    assert start_versions([]) == {"0": 0}


@pytest.mark.parametrize(("slimes", "missing"), [(True, [6]), (False, [1, 2, 3, 4, 6])])
def test_only_slime_runs_may_continue_from_another_directory(tmp_path: Path, slimes: bool, missing: list[int]) -> None:
    file = IterationFile(tmp_path / "metrics.jsonl")
    for iteration in (5, 7):
        extra = {"train/slime_rollout_id": iteration - 1.0} if slimes else {}
        file.append(iteration, [{"weights/version": str(iteration), **extra}])
    summary = {"reason": "finished", "iterations": 3 if slimes else 7}  # slime's: without earlier directories
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    findings = audit(tmp_path).findings
    sentences = [f"metrics.jsonl: there is no line of iteration {iteration}" for iteration in missing]
    assert [finding for finding in findings if "there is no line" in finding] == sentences
    assert not [finding for finding in findings if "iterations" in finding]


@pytest.mark.parametrize(
    ("versions", "wrong"),
    [
        (["1", "1", "3"], []),  # untrained iterations of older runs took a number
        (["1", "1", "4"], ["3"]),
        (["1", "2", "2"], ["2"]),
    ],
)
def test_an_iteration_without_training_has_the_version_before_it(tmp_path: Path, versions: list[str], wrong: list[str]):
    metrics, trained = IterationFile(tmp_path / "metrics.jsonl"), IterationFile(tmp_path / "trained.jsonl")
    for iteration, version in enumerate(versions, 1):
        metrics.append(iteration, [{"weights/version": version}])
        if iteration != 2:
            line = {"instance_id": str(iteration), "rollouts": {f"ro-{iteration}": 1.0}, "samples": []}
            trained.append(iteration, [line])
    findings = [finding for finding in audit(tmp_path).findings if "weights/version" in finding]
    assert sorted({re.findall(r"iteration (\d)", finding)[0] for finding in findings}) == wrong


@pytest.mark.parametrize(
    ("config", "found"), [({"max_staleness": 1}, True), ({"max_staleness": 2}, False), ({}, False)]
)
def test_tokens_older_than_the_limit_are_a_finding(tmp_path: Path, config: dict[str, int], found: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    metrics, trained = IterationFile(tmp_path / "metrics.jsonl"), IterationFile(tmp_path / "trained.jsonl")
    for iteration in (1, 2, 3):
        metrics.append(iteration, [{"weights/version": str(iteration)}])
        samples = [[f"ro-{iteration}", "digest", 4, {"0": 3, str(iteration - 1): 1}]]
        trained.append(
            iteration, [{"instance_id": str(iteration), "rollouts": {f"ro-{iteration}": 1.0}, "samples": samples}]
        )
    findings = [finding for finding in audit(tmp_path).findings if "max_staleness" in finding]
    sentence = "trained.jsonl line 3: tokens of rollout ro-3 are 2 versions old, and max_staleness is 1"
    assert findings == [sentence] * found
