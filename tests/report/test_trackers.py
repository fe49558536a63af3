"""Where else a run is seen: spans at a receiver of OTLP, and trackers."""

import gzip
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_slime.data.results import GroupResult, MemberResult
from agl_slime.errors import MissingDependencyError
from agl_slime.events import GroupsCollected, IterationFinished, RunFinished, RunStarted
from agl_slime.report.files import RunDir, open_run_dir
from agl_slime.report.otlp import OtlpWriter
from agl_slime.report.trackers import MlflowWriter, WandbWriter, need_trackers
from agl_slime.support.net import free_port
from tests.harness.loop import TASKS, HelloAgent, LoopCase, hello_engine
from tests.harness.servers import Handler, served_by


@contextmanager
def receiver() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A collector's address, and the requests that it accepted."""
    requests: list[ExportTraceServiceRequest] = []

    class Collector(Handler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body
            assert self.path == "/v1/traces"
            requests.append(ExportTraceServiceRequest.FromString(body))
            self.answer()

    with served_by(Collector) as url:
        yield url, requests


def values(attributes: Any) -> dict[str, Any]:
    """OTLP's attributes as plain values."""
    plain = {}
    for each in attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        plain[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return plain


def judge(task: dict[str, Any], response: str) -> Any:
    if task["name"] == "Alan":
        raise ValueError("no judge for Alan")
    return {"right": 0.5, "short": 1.0}


def run_with_spans(directory: Path) -> LoopCase:
    """A run with a group without rewards among its groups of two rollouts."""
    run = open_run_dir(directory, agent="a", settings={"agent": "my:Hello", "model_path": "m"}, resume=False)
    writer = OtlpWriter(run)
    with (
        hello_engine() as engine,
        LoopCase(
            agent=HelloAgent(judge=judge),
            url=engine.url,
            on_event=writer.handle,
            tasks=TASKS[:2],
            max_replaced_groups=20,
        ) as case,
    ):
        case.loop.run()
    return case


@pytest.mark.parametrize("with_messages", [False, True])
def test_each_rollout_is_a_trace_with_its_reward_and_calls(with_messages, tmp_path, monkeypatch):
    with receiver() as (url, requests):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", str(with_messages))
        case = run_with_spans(tmp_path / "run")
    resources = [values(each.resource.attributes) for request in requests for each in request.resource_spans]
    assert {resource["rl.run.id"] for resource in resources} == {"run"}
    scopes = [scope for request in requests for each in request.resource_spans for scope in each.scope_spans]
    spans = [span for scope in scopes for span in scope.spans]
    roots = {values(span.attributes)["gen_ai.conversation.id"]: span for span in spans if not span.parent_span_id}
    ended = {event.rollout_id: event for event in case.recorder.rollouts}
    assert roots.keys() == ended.keys()
    for rollout_id, root in roots.items():
        attributes, event = values(root.attributes), ended[rollout_id]
        [call] = [span for span in spans if span.parent_span_id == root.span_id]
        assert (root.name, call.name) == ("invoke_agent my:Hello", "chat m")
        assert call.trace_id == root.trace_id
        assert root.start_time_unix_nano <= call.start_time_unix_nano <= call.end_time_unix_nano
        assert call.end_time_unix_nano <= root.end_time_unix_nano
        answer = values(call.attributes)
        assert answer["gen_ai.usage.output_tokens"] == attributes["gen_ai.usage.output_tokens"] == event.tokens
        assert answer["gen_ai.usage.input_tokens"] > 0
        assert answer["gen_ai.response.finish_reasons"] == ["stop"]
        assert attributes.get("rl.reward.value") == event.reward
        assert attributes.get("rl.reward.short") == (None if event.reward is None else 1.0)
        assert attributes["rl.sample.used"] == (event.reward is not None)
        assert attributes.get("error.type", "") == event.reason
        assert ("no judge for Alan" in root.status.message) == (event.reward is None)
        assert ("say hello" in attributes.get("gen_ai.input.messages", "")) == with_messages
    assert {event.reward for event in ended.values()} == {None, 0.5}


def test_a_batch_of_thousands_of_spans_arrives_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come at once, with the event of their iteration."""
    timeline = {"enqueued": 1.0, "started": 0.0, "ended": 2.0, "calls": [[0.0, 1.0]] * 9}
    members = tuple(MemberResult(rollout_id=str(n), group_id="g", reward=1.0, timeline=timeline) for n in range(400))
    group = GroupResult(group_id="g", mode="train", size=len(members), members=members, ready=True)
    with receiver() as (url, requests):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        writer = OtlpWriter(open_run_dir(tmp_path / "run", agent="a", settings={}, resume=False))
        for event in (RunStarted(), GroupsCollected(iteration=1, groups=[group]), RunFinished()):
            writer.handle(event)
    scopes = [scope for request in requests for each in request.resource_spans for scope in each.scope_spans]
    assert sum(len(scope.spans) for scope in scopes) == 400 * 10


def test_collector_that_does_not_answer_is_one_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")  # all spans leave at the end
    with caplog.at_level(logging.WARNING):
        case = run_with_spans(tmp_path / "run")
    assert case.recorder.end.reason == "finished"
    [warning] = [record.getMessage() for record in caplog.records if "otlp" in record.getMessage().lower()]
    n_spans = 2 * len(case.recorder.rollouts)
    assert f"--track otlp: {n_spans} spans were not delivered; check OTEL_EXPORTER_OTLP_ENDPOINT" in warning


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
