"""The tracer's spans equal Agent Lightning's."""

from __future__ import annotations

from typing import Any

from agl_slime.runner.tracer import ContextTracer
from agl_slime.store.recording import Recording, current_recording
from agl_slime.support.agl import Span, SpanCoreFields, TraceStatus

ATTRIBUTES = {"a": 1, "b": [1.5], "c": ["x"], "d": True, "e": "text"}
ERROR = {"status_code": "ERROR", "description": "d"}


async def spans_of(*cores: dict[str, Any]) -> list[Span]:
    recording = Recording("ro", "at")
    token = current_recording.set(recording)
    try:
        for core in cores:
            span = ContextTracer().create_span(
                core["name"], core["attributes"], core["start_time"], TraceStatus(**ERROR)
            )
            span.end_time = core["end_time"]
    finally:
        current_recording.reset(token)
    await recording.write()
    return recording.written


async def test_span_equals_agent_lightnings_and_shares_no_mutable_state() -> None:
    core = {"name": "x", "attributes": ATTRIBUTES, "start_time": 1.0, "end_time": 2.0}
    ours, second = await spans_of(core, core)
    stock = Span.from_core_fields(
        SpanCoreFields(**core, status=TraceStatus(**ERROR)), rollout_id="ro", attempt_id="at", sequence_id=1
    )
    assert ours.context is not None
    assert (ours.context.trace_id, ours.context.span_id) == (ours.trace_id, ours.span_id)
    assert (len(ours.trace_id), len(ours.span_id)) == (32, 16)
    ids = {"trace_id": ours.trace_id, "span_id": ours.span_id}
    assert stock.context is not None
    stock = stock.model_copy(update={**ids, "context": stock.context.model_copy(update=ids)})
    assert ours == stock
    assert ours.model_dump_json(exclude_unset=True) == stock.model_dump_json(exclude_unset=True)
    assert Span.model_validate_json(ours.model_dump_json()) == ours

    assert (ours.span_id, ours.trace_id) != (second.span_id, second.trace_id)
    for name in ("attributes", "events", "links", "status", "context", "resource"):
        assert getattr(ours, name) is not getattr(second, name), name
    assert second.context is not None
    assert ours.context.trace_state is not second.context.trace_state
    assert ours.resource.attributes is not second.resource.attributes


async def test_lone_surrogates_are_spelled_out() -> None:
    """JSON cannot encode them: the span, with its failure reason or reward, would be lost."""
    attributes = {"text": "caf\ud800 é", "texts": ["\udfff", "b"], "plain": "é"}
    [span] = await spans_of({"name": "x", "attributes": attributes, "start_time": 1.0, "end_time": 2.0})
    assert span.attributes == {"text": "caf\\ud800 é", "texts": ["\\udfff", "b"], "plain": "é"}
    assert Span.model_validate_json(span.model_dump_json()) == span
