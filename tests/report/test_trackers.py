"""Weights & Biases and MLflow, each by its own library and without a network."""

import json
from pathlib import Path
from typing import Any

import pytest

from agl_slime.errors import MissingDependencyError
from agl_slime.events import IterationFinished, RunFinished, RunStarted
from agl_slime.report.files import RunDir, open_run_dir
from agl_slime.report.trackers import MlflowWriter, WandbWriter, need_trackers

METRICS: dict[str, Any] = {"rollout/reward_mean": 0.5, "train/entropy": float("nan"), "weights/version": "7"}


def a_run(path: Path) -> RunDir:
    settings = {"agent": "a" * 900, "local": {"lr": 0.1}}
    return open_run_dir(path, agent="a", settings=settings, resume=(path / "config.json").exists())


def tell(writer: Any, *iterations: int, reason: str = "finished") -> None:
    writer.handle(RunStarted())
    for iteration in iterations:
        writer.handle(IterationFinished(iteration=iteration, metrics=METRICS))
    writer.handle(RunFinished(reason=reason))
    writer.close()


def test_missing_tracker_library_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_slime.report.trackers.find_spec", lambda name: None)
    need_trackers(())
    with pytest.raises(MissingDependencyError, match=r"--track mlflow .*agl-slime\[mlflow\]"):
        need_trackers(["mlflow"])


def test_mlflow_has_metrics_by_iteration_and_a_resumed_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tracking = pytest.importorskip("mlflow.tracking", reason='no MLflow: pip install "agl-slime[mlflow]"')
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = a_run(tmp_path / "run")
    tell(MlflowWriter(run), 1, 2, reason="interrupted")
    run_id = json.loads(run.trackers.read_text())["mlflow"]
    client = tracking.MlflowClient()
    assert client.get_run(run_id).info.status == "FAILED"
    tell(MlflowWriter(a_run(tmp_path / "run")), 3)
    stored = client.get_run(run_id)
    assert stored.info.status == "FINISHED"
    assert stored.info.run_name == "run"
    assert stored.data.params["local.lr"] == "0.1"
    assert len(stored.data.params["agent"]) == 500
    assert set(stored.data.metrics) == {"rollout/reward_mean"}
    history = client.get_metric_history(run_id, "rollout/reward_mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert len(client.search_runs([stored.info.experiment_id])) == 1


@pytest.mark.slow
def test_wandb_writes_a_run_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason='no Weights & Biases: pip install "agl-slime[wandb]"')
    for name, value in {"MODE": "offline", "SILENT": "true", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setattr("sys.argv", ["train.py", "--sglang-url", "http://user:PLANTED@host/"])
    run = a_run(tmp_path / "run")
    tell(WandbWriter(run), 1, 2)
    (written,) = (run.path / "wandb").glob("offline-run-*/*.wandb")
    content = written.read_bytes()
    assert b"rollout/reward_mean" in content
    assert b"train/entropy" not in content
    assert json.loads(run.trackers.read_text())["wandb"].encode() in content
    files = [file for file in run.path.rglob("*") if file.is_file()]
    assert [file for file in files if b"PLANTED" in file.read_bytes()] == []
