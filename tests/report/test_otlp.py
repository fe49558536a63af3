"""Spans of rollouts, from a whole loop to a receiver that speaks OTLP over HTTP."""

import gzip
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agl_slime.report.files import open_run_dir
from agl_slime.report.otlp import OtlpWriter
from agl_slime.support.net import free_port
from tests.harness.loop import TASKS, HelloAgent, LoopCase, hello_engine


@contextmanager
def receiver() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A collector's address, and the requests that it accepted."""
    requests: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body
            assert self.path == "/v1/traces"
            requests.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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
