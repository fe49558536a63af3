"""A tracer for many rollouts at once.

Agent Lightning's own tracer keeps one rollout per process and submits each span on its own, waiting for the store. This one keeps the rollout in a
context variable, gathers the spans of an attempt in memory and writes them in one call when the attempt ends, so an agent never waits for the store
in the middle of its work.

Spans come from two sides: Agent Lightning's emitters (``emit_reward`` and the rest, through ``create_span``), and any OpenTelemetry instrumentation
inside the agent, through a span processor on the global tracer provider.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any
from weakref import WeakValueDictionary

from opentelemetry import trace as trace_api
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan

from agl_slime._agl import (
    LightningStore,
    OtelSpanRecordingContext,
    Span,
    SpanCoreFields,
    Tracer,
    TraceStatus,
    clear_active_tracer,
    get_active_tracer,
    set_active_tracer,
)
from agl_slime.runner.recording import Recording, SpanBuilder, current_recording

logger = logging.getLogger(__name__)


class ContextTracer(Tracer):
    """Routes each span to the rollout whose code is running; see the module's docstring."""

    # -- life cycle -----------------------------------------------------------------------------------------------------------------------

    def init_worker(self, worker_id: int, store: LightningStore | None = None) -> None:
        super().init_worker(worker_id, store)
        _attach_processor()
        _activate(self)

    def teardown_worker(self, worker_id: int) -> None:
        _deactivate()
        super().teardown_worker(worker_id)

    def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AbstractAsyncContextManager[Recording]:
        """The scope of one attempt; on leaving it, also by an exception, its spans are written to the store in one call."""
        if (rollout_id is None) != (attempt_id is None):
            raise ValueError("trace_context needs rollout_id and attempt_id together, or neither")
        recording = Recording(rollout_id or "rollout-untracked", attempt_id or "attempt-untracked")
        return _AttemptScope(recording, (store or self._store) if rollout_id is not None else None)

    # -- spans ----------------------------------------------------------------------------------------------------------------------------

    def create_span(
        self,
        name: str,
        attributes: Any = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        now = timestamp if timestamp is not None else time.time()
        core = SpanCoreFields(
            name=name, attributes=dict(attributes or {}), start_time=now, end_time=now, status=status or TraceStatus(status_code="UNSET")
        )
        _record(lambda rollout_id, attempt_id, sequence_id: _from_core(core, rollout_id, attempt_id, sequence_id), name)
        return core

    @contextmanager
    def operation_context(
        self, name: str, attributes: Any = None, start_time: float | None = None, end_time: float | None = None
    ) -> Iterator[OtelSpanRecordingContext]:
        tracer = trace_api.get_tracer_provider().get_tracer(__name__)
        start_ns = int(start_time * 1e9) if start_time is not None else None
        # The exception is recorded below, once, in Agent Lightning's form.
        with tracer.start_as_current_span(
            name, attributes=attributes, start_time=start_ns, record_exception=False, set_status_on_exception=False
        ) as span:
            recording = OtelSpanRecordingContext(span)
            try:
                yield recording
            except Exception as error:
                recording.record_exception(error)
                raise

    def get_last_trace(self) -> list[Span]:
        """The spans of the attempt that this context runs, or ran last."""
        recording = current_recording.get()
        return list(recording.written) if recording is not None else []


class _AttemptScope(AbstractAsyncContextManager[Recording]):
    """Makes a recording current, and writes it when left. The context variable keeps the finished recording, so that ``get_last_trace`` works after
    the scope."""

    def __init__(self, recording: Recording, store: LightningStore | None) -> None:
        self._recording = recording
        self._store = store

    async def __aenter__(self) -> Recording:
        current_recording.set(self._recording)
        return self._recording

    async def __aexit__(self, *exc_info: object) -> None:
        recording = self._recording
        builders = recording.take(close=True)
        if not builders:
            return
        if self._store is None:
            recording.written.extend(build(recording.rollout_id, recording.attempt_id, i) for i, build in enumerate(builders, 1))
            return
        key = (recording.rollout_id, recording.attempt_id)
        sequence_ids = await self._store.get_many_span_sequence_ids([key] * len(builders))
        spans = [build(*key, sequence_id) for build, sequence_id in zip(builders, sequence_ids, strict=True)]
        await self._store.add_many_spans(spans)
        recording.written.extend(spans)


class _RecordingSpanProcessor(SpanProcessor):
    """Hands finished OpenTelemetry spans to the recording that was current where they *started*: they may end in a callback thread without context.

    What ends is a copy of what started, so the two are matched by trace and span id; a span that never ends is forgotten with its recording.
    """

    def __init__(self) -> None:
        self._started: WeakValueDictionary[tuple[int, int], Recording] = WeakValueDictionary()

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        recording = current_recording.get()
        if recording is not None:
            self._started[_key_of(span)] = recording

    def on_end(self, span: ReadableSpan) -> None:
        recording = self._started.pop(_key_of(span), None)
        if recording is None:
            return
        if not recording.add(lambda rollout_id, attempt_id, sequence_id: _from_otel(span, rollout_id, attempt_id, sequence_id)):
            logger.warning("Span %r ended after its rollout %s and is not recorded.", span.name, recording.rollout_id)


def _key_of(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    return (context.trace_id, context.span_id) if context is not None else (0, 0)


def _from_core(core: SpanCoreFields, rollout_id: str, attempt_id: str, sequence_id: int) -> Span:
    return Span.from_core_fields(core, rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=sequence_id)


def _from_otel(span: ReadableSpan, rollout_id: str, attempt_id: str, sequence_id: int) -> Span:
    return Span.from_opentelemetry(span, rollout_id=rollout_id, attempt_id=attempt_id, sequence_id=sequence_id)


def _record(builder: SpanBuilder, name: str) -> None:
    recording = current_recording.get()
    if recording is None:
        logger.warning("Span %r was emitted outside of any rollout and is dropped.", name)
    elif not recording.add(builder):
        logger.warning("Span %r came after its rollout %s had ended and is dropped.", name, recording.rollout_id)


# -- process-wide state: one span processor and one active tracer, shared by all ContextTracers ------------------------------------------------

_state_lock = threading.Lock()
_processor: _RecordingSpanProcessor | None = None
_users = 0


def _attach_processor() -> None:
    global _processor
    with _state_lock:
        if _processor is None:
            provider = trace_api.get_tracer_provider()
            if not isinstance(provider, TracerProvider):
                provider = TracerProvider()
                trace_api.set_tracer_provider(provider)
            _processor = _RecordingSpanProcessor()
            provider.add_span_processor(_processor)


def _activate(tracer: ContextTracer) -> None:
    # Agent Lightning's emitters look the tracer up in a process global. All ContextTracers share the context variable, so any one of them serves them
    # all.
    global _users
    with _state_lock:
        if not isinstance(get_active_tracer(), ContextTracer):
            set_active_tracer(tracer)
        _users += 1


def _deactivate() -> None:
    global _users
    with _state_lock:
        _users -= 1
        if _users == 0 and isinstance(get_active_tracer(), ContextTracer):
            clear_active_tracer()


__all__ = ["ContextTracer"]
