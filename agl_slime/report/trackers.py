"""Weights & Biases, MLflow and OTLP, each through its own library and configured by its own environment variables
(``WANDB_MODE``, ``WANDB_PROJECT``, ``MLFLOW_TRACKING_URI`` …). A resumed run continues its tracker run, whose id is in
``trackers.json``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal

from agl_slime.errors import MissingDependencyError
from agl_slime.events import Event, IterationFinished, Reporter, RunFinished, RunStarted
from agl_slime.report.files import RunDir, dump, read_object
from agl_slime.report.metrics import scalars
from agl_slime.support.files import write_file

Tracker = Literal["wandb", "mlflow", "otlp"]
_PROJECT = "agl-slime"
_MAX_PARAM = 500  # characters, accepted by every MLflow server


def need_trackers(names: Sequence[str]) -> None:
    """Raises ``MissingDependencyError`` for a tracker whose library is not installed."""
    for name in names:
        if name != "otlp" and find_spec(name) is None:  # whose exporter Agent Lightning installs
            raise MissingDependencyError(f'--track {name} needs its library: pip install "agl-slime[{name}]"')


def _ids(run: RunDir) -> dict[str, str]:
    """The ids of the run by tracker."""
    return read_object(run.trackers) or {}


def _keep_id(run: RunDir, tracker: str, run_id: str) -> None:
    write_file(run.trackers, dump({**_ids(run), tracker: run_id}), durable=False)


class WandbWriter:
    """One run of Weights & Biases. Metrics are drawn over ``iteration``, so that iterations may be logged again."""

    note = "no iteration was finished"

    def __init__(self, run: RunDir) -> None:
        self.path = run.path / "wandb"
        self._dir = run
        self._run: Any = None

    def handle(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            import wandb

            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                name=self._dir.path.resolve().name,
                dir=str(self._dir.path),
                config=self._dir.settings() or {},
                id=_ids(self._dir).get("wandb"),
                resume="allow",
                settings=wandb.Settings(x_disable_meta=True),  # which has the command line, with its keys
            )
            _keep_id(self._dir, "wandb", self._run.id)
            self._run.define_metric("iteration")
            self._run.define_metric("*", step_metric="iteration")
        elif isinstance(event, IterationFinished) and self._run is not None:
            self._run.log({"iteration": event.iteration, **scalars(event.metrics)})
        elif isinstance(event, RunFinished):
            self._end(0 if event.reason == "finished" else 1)

    def close(self) -> None:
        self._end(1)

    def _end(self, code: int) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=code)


class MlflowWriter:
    """One run of MLflow in the experiment ``agl-slime``, or the one that ``MLFLOW_EXPERIMENT_NAME`` names."""

    note = "no iteration was finished"

    def __init__(self, run: RunDir) -> None:
        self.path = run.trackers
        self._dir = run
        self._client: Any = None
        self._run_id = ""

    def handle(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start()
        elif isinstance(event, IterationFinished) and self._client is not None:
            self._log(event)
        elif isinstance(event, RunFinished):
            self._end("FINISHED" if event.reason == "finished" else "FAILED")

    def close(self) -> None:
        self._end("KILLED")

    def _start(self) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        client = MlflowClient()
        run_id = _ids(self._dir).get("mlflow")
        if run_id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
            experiment = client.get_experiment_by_name(name)
            experiment_id = client.create_experiment(name) if experiment is None else experiment.experiment_id
            run_id = client.create_run(experiment_id, run_name=self._dir.path.resolve().name).info.run_id
            _keep_id(self._dir, "mlflow", run_id)
            params = [Param(name, str(value)[:_MAX_PARAM]) for name, value in _flat(self._dir.settings() or {})]
            for start in range(0, len(params), 100):  # the limit of a request
                client.log_batch(run_id, params=params[start : start + 100])
        else:
            client.update_run(run_id, status="RUNNING")
        self._client, self._run_id = client, run_id

    def _log(self, event: IterationFinished) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [Metric(key, value, now, event.iteration) for key, value in scalars(event.metrics).items()]
        for start in range(0, len(values), 1000):
            self._client.log_batch(self._run_id, metrics=values[start : start + 1000])

    def _end(self, status: str) -> None:
        if self._client is not None:
            client, self._client = self._client, None
            client.set_terminated(self._run_id, status=status)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def make_trackers(names: Sequence[str], run: RunDir) -> dict[str, Reporter]:
    trackers: dict[str, Reporter] = {}
    for name in names:
        if name == "otlp":
            from agl_slime.report.otlp import OtlpWriter  # imports OpenTelemetry

            trackers[name] = OtlpWriter(run)
        else:
            trackers[name] = WandbWriter(run) if name == "wandb" else MlflowWriter(run)
    return trackers
