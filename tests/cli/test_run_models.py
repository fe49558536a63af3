"""Which validation is the best one, for ``--keep-best``."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from agl_slime.cli.model_dir import RunModels
from agl_slime.events import IterationFinished
from agl_slime.report.files import RunDir


def validated(
    iteration: int, mean: float | None, failed: int, count: int = 16, version: int | None = None
) -> IterationFinished:
    version = iteration if version is None else version
    metrics = {"val/reward_mean": mean, "val/count": count, "val/failed": failed, "weights/version": str(version)}
    return IterationFinished(iteration=iteration, metrics=metrics)


def models_of(directory: Path) -> RunModels:
    for iteration in range(1, 9):
        weights = directory / "weights" / f"v{iteration:06d}"
        weights.mkdir(parents=True, exist_ok=True)
        (weights / "config.json").write_text("{}")
    return RunModels(RunDir(directory), base=directory, weights=directory / "weights")


def best(directory: Path) -> int | None:
    about = directory / "model-best" / "agl_slime_model.json"
    return json.loads(about.read_text())["iteration"] if about.exists() else None


def test_a_validation_whose_rollouts_failed_is_not_the_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    models = models_of(tmp_path)
    for event, wanted, told in (
        (validated(1, 1.0, failed=15), None, "validation (1.000 of 1/16) is not compared for model-best"),
        (validated(2, 0.5, failed=0), 2, ""),
        (validated(3, None, failed=16), 2, ""),
        (validated(4, 1.0, failed=15), 2, "is not compared"),
        (validated(5, 0.6, failed=1), 5, "(0.600 of 15/16), with another share of failed rollouts than before"),
        (validated(6, 0.7, failed=1), 6, ""),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            models.handle(event)
        models.save_best()
        assert best(tmp_path) == wanted
        assert told in caplog.text
        assert bool(told) == bool(caplog.records)
    with caplog.at_level(logging.WARNING):  # a resumed run knows the share of before
        models_of(tmp_path).handle(validated(7, 0.8, failed=0))
    assert "another share of failed rollouts" in caplog.text


def test_the_best_model_is_of_an_iteration_without_training(tmp_path: Path) -> None:
    models = models_of(tmp_path)
    (tmp_path / "weights" / "v000003" / "config.json").write_text('{"third": true}')
    models.handle(validated(20, 0.5, failed=0, version=3))  # of 20 iterations 3 had a group to train on
    models.save_best()
    assert best(tmp_path) == 20
    assert json.loads((tmp_path / "model-best" / "config.json").read_text()) == {"third": True}
