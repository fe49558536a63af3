"""``ContextTracer``: a tracer for many concurrent rollouts.

Agent Lightning's tracer has one rollout per process and submits each span separately, waiting for the store. This one
has the rollout in a context variable, collects the spans of an attempt in memory and writes them in one call when the
attempt ends, so an agent never waits for the store. Spans of a long attempt are written earlier (``runner.guard``).

Spans come from Agent Lightning's emitters (``emit_reward`` and others, through ``create_span``), and from OpenTelemetry
instrumentation inside the agent, through a span processor on the global tracer provider.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from opentelemetry import trace as trace_api
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace import Span as SdkSpan

from agl_slime.store.recording import Recording, current_recording
from agl_slime.support.agl import (
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
from agl_slime.support.threads import current_rollout
from agl_slime.tokens.reward import REWARD_PREFIX, check_names

logger = logging.getLogger(__name__)

_REWARD_NAME = re.compile(rf"{REWARD_PREFIX}\.\d+\.name")


class ContextTracer(Tracer):
    """Routes each span to the rollout whose code is running; see the module's docstring."""

    # -- life cycle ---------------------------------------------------------------------------------------------------

    def init_worker(self, worker_id: int, store: LightningStore | None = None) -> None:
        super().init_worker(worker_id, store)
        # Agent Lightning's emitters use a process-global tracer; any ContextTracer will do, as all share the variable
        global _processor, _users
        with _state_lock:
            if _processor is None:
                provider = trace_api.get_tracer_provider()
                if not isinstance(provider, TracerProvider):
                    provider = TracerProvider()
                    trace_api.set_tracer_provider(provider)
                _processor = _RecordingSpanProcessor()
                provider.add_span_processor(_processor)
            if not isinstance(get_active_tracer(), ContextTracer):
                set_active_tracer(self)
            _users += 1

    def teardown_worker(self, worker_id: int) -> None:
        global _users
        with _state_lock:
            _users -= 1
            if _users == 0 and isinstance(get_active_tracer(), ContextTracer):
                clear_active_tracer()
        super().teardown_worker(worker_id)

    @asynccontextmanager
    async def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> AsyncIterator[Recording]:
        """The scope of one attempt. Its exit, also by an exception, writes the spans to the store in one call. The
        context variable keeps the finished recording for ``get_last_trace``."""
        if (rollout_id is None) != (attempt_id is None):
            raise ValueError("trace_context needs rollout_id and attempt_id together, or neither")
        if rollout_id is None or attempt_id is None:
            recording = Recording("rollout-untracked", "attempt-untracked")
        else:
            recording = Recording(rollout_id, attempt_id, store=store or self._store)
        current_recording.set(recording)
        current_rollout.set(recording.rollout_id)
        try:
            yield recording
        finally:
            await recording.write(close=True)

    # -- spans --------------------------------------------------------------------------------------------------------

    def create_span(
        self, name: str, attributes: Any = None, timestamp: float | None = None, status: TraceStatus | None = None
    ) -> SpanCoreFields:
        attributes = attributes or {}
        check_names((attributes[key] for key in attributes if _REWARD_NAME.fullmatch(str(key))), "emit_reward")
        now = timestamp if timestamp is not None else time.time()
        core = SpanCoreFields(
            name=name,
            attributes={key: _writable(value) for key, value in attributes.items()},
            start_time=now,
            end_time=now,
            status=status or TraceStatus(status_code="UNSET"),
        )
        recording = current_recording.get()
        if recording is None:
            logger.warning("Span %r was emitted outside of any rollout and is dropped.", name)
        elif not recording.add(partial(Span.from_core_fields, core)):
            logger.warning("Span %r came after its rollout %s had ended and is dropped.", name, recording.rollout_id)
        return core

    @contextmanager
    def operation_context(
        self, name: str, attributes: Any = None, start_time: float | None = None, end_time: float | None = None
    ) -> Iterator[OtelSpanRecordingContext]:
        tracer = trace_api.get_tracer_provider().get_tracer(__name__)
        start_ns = int(start_time * 1e9) if start_time is not None else None
        # the exception is recorded below, in Agent Lightning's form
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
        """The spans of this context's current or last attempt."""
        recording = current_recording.get()
        return list(recording.written) if recording is not None else []


class _RecordingSpanProcessor(SpanProcessor):
    """Adds OpenTelemetry spans to the recording of the code that *started* them: they may end without its context.

    A span belongs to the recording of its unfinished parent, since code that passes a parent explicitly knows more than
    the thread's context; otherwise to the current recording. The span at its end is a copy of the started one, so the
    two are matched by trace and span id. A span that never ends is forgotten with its recording.
    """

    def __init__(self) -> None:
        self._started: WeakValueDictionary[tuple[int, int], Recording] = WeakValueDictionary()

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        parent = span.parent
        recording = self._started.get((parent.trace_id, parent.span_id)) if parent is not None else None
        recording = recording or current_recording.get()
        if recording is not None:
            self._started[_key_of(span)] = recording

    def on_end(self, span: ReadableSpan) -> None:
        recording = self._started.pop(_key_of(span), None)
        if recording is not None and not recording.add(partial(Span.from_opentelemetry, span)):
            logger.warning("Span %r ended after its rollout %s and is not recorded.", span.name, recording.rollout_id)


def _key_of(span: ReadableSpan) -> tuple[int, int]:
    context = span.get_span_context()
    return (context.trace_id, context.span_id) if context is not None else (0, 0)


def _writable(value: Any) -> Any:
    """``value`` with lone surrogates as backslash escapes: JSON and databases refuse them."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    texts = isinstance(value, (list, tuple)) and value and isinstance(value[0], str)
    return [_writable(item) for item in value] if texts else value


# -- process-wide state: one span processor and one active tracer, shared by all ContextTracers ----------------------

_state_lock = threading.Lock()
_processor: _RecordingSpanProcessor | None = None
_users = 0
