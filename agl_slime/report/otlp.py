"""Spans of rollouts for a collector of OpenTelemetry (Jaeger, Tempo, Langfuse, Phoenix …), by OTLP over HTTP."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

from agl_slime.events import Event, GroupsCollected, IterationFinished, RunFinished, RunStarted
from agl_slime.report.files import RunDir

logger = logging.getLogger(__name__)

_CAPTURE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"  # OpenTelemetry's own: whether spans have messages

_MOST_SPANS = 2**20  # that wait; the processor drops others, and a batch's spans come at once


class OtlpWriter:
    """A trace for each rollout of a group: a span of the agent with reward and outcome, and a child for each model call
    with its tokens. Names follow OpenTelemetry's GenAI conventions and ``rl.*`` of their proposal 88, in development
    both; validations have no trace. Server and headers come from ``OTEL_EXPORTER_OTLP_ENDPOINT`` and its kin.
    """

    def __init__(self, run: RunDir) -> None:
        self._dir = run
        self._provider: TracerProvider | None = None
        self._exporter: _CountingExporter | None = None
        self._agent = self._model = "?"

    def handle(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._start()
        elif isinstance(event, GroupsCollected):
            for group in event.groups:
                for member in group.members:
                    self._emit(member, group, event.iteration)
        elif isinstance(event, IterationFinished) and self._exporter is not None:
            self._exporter.report_lost()
        elif isinstance(event, RunFinished):
            self.close()

    def close(self) -> None:
        if self._provider is not None:
            provider, self._provider = self._provider, None
            provider.shutdown()  # sends the rest, within the exporter's time limit
            assert self._exporter is not None
            self._exporter.report_lost()

    def _start(self) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        # which has a line for every try; report_lost has one
        logging.getLogger(OTLPSpanExporter.__module__).setLevel(logging.CRITICAL)
        settings, name = self._dir.settings() or {}, self._dir.path.resolve().name
        self._agent, self._model = str(settings.get("agent")), str(settings.get("model_path") or "policy")
        resource = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "agl-slime"), "rl.system": "agl-slime"}
        resource |= {"rl.run.id": name, "rl.environment.name": self._agent, "rl.model.name": self._model}
        self._provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
        self._exporter = _CountingExporter(OTLPSpanExporter())
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter, max_queue_size=_MOST_SPANS))

    def _emit(self, member: Any, group: Any, iteration: int) -> None:
        timeline = member.timeline
        if self._provider is None or not timeline:
            return
        zero, conversation = timeline["enqueued"], member.conversation
        calls = timeline["calls"]
        started = timeline["started"] or 0.0
        ended = max([timeline["ended"] or 0.0, started, *(end for _, end in calls)])
        turns = conversation.turns if len(conversation.turns) == len(calls) else [{}] * len(calls)
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": self._agent,
            "gen_ai.conversation.id": member.rollout_id,
            "gen_ai.usage.output_tokens": member.sampled_tokens,
            "rl.iteration": iteration,
            "rl.sample.group_id": member.group_id,
            "rl.sample.instance_id": member.instance_id,
            "rl.sample.used": bool(member.ok and group.ready),
            "rl.sample.dropped_reason": member.failure or ("" if group.ready else group.code) or None,
            "rl.reward.value": member.reward,
            **{f"rl.reward.{name}": value for name, value in member.rewards.items()},
        }
        if os.environ.get(_CAPTURE, "").lower() == "true":
            attributes["gen_ai.input.messages"] = json.dumps(list(conversation.messages), default=str)
        tracer = self._provider.get_tracer("agl_slime")
        root = tracer.start_span(
            f"invoke_agent {self._agent}", start_time=_ns(zero + started), attributes=_present(attributes)
        )
        if member.failure:
            root.set_attribute("error.type", member.failure)
            root.set_status(Status(StatusCode.ERROR, member.failure_message))
        for (call_start, call_end), turn in zip(calls, turns, strict=True):
            attributes = {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "sglang",
                "gen_ai.request.model": self._model,
                "gen_ai.usage.input_tokens": turn.get("prompt_tokens"),
                "gen_ai.usage.output_tokens": turn.get("tokens"),
                "gen_ai.usage.cache_read.input_tokens": turn.get("cached_tokens"),
                "gen_ai.response.finish_reasons": [finish] if (finish := turn.get("finish")) else None,
                "rl.sample.fork": turn.get("fork"),
            }
            call = tracer.start_span(
                f"chat {self._model}",
                context=set_span_in_context(root),
                kind=SpanKind.CLIENT,
                start_time=_ns(zero + call_start),
                attributes=_present(attributes),
            )
            call.end(end_time=_ns(zero + call_end))
        root.end(end_time=_ns(zero + ended))


class _CountingExporter(SpanExporter):
    """Counts the spans that ``exporter`` could not deliver."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.lost = 0
        self._reported = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self.lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def report_lost(self) -> None:
        """Warn once of the first loss."""
        if self.lost and not self._reported:
            fix = "check OTEL_EXPORTER_OTLP_ENDPOINT (default http://localhost:4318)"
            logger.warning("--track otlp: %d spans were not delivered; %s.", self.lost, fix)
            self._reported = True


def _ns(time_s: float) -> int:
    return int(time_s * 1e9)


def _present(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None}
