"""Spans as the tracer makes them are those that Agent Lightning would make."""

from __future__ import annotations

from typing import Any

import pytest

from agl_slime.runner.tracer import ContextTracer
from agl_slime.store.recording import Recording, current_recording
from agl_slime.support.agl import Span, SpanCoreFields, TraceStatus

CORES: list[dict[str, Any]] = [
    {
        "name": "x",
        "attributes": {"a": 1, "b": [1.5], "c": ["x"], "d": True, "e": "text"},
        "start_time": 1.0,
        "end_time": 2.0,
    },
    {"name": "", "attributes": {}, "start_time": 1.0, "end_time": None},
]


async def spans_of(*cores: dict[str, Any]) -> list[Span]:
    recording = Recording("ro", "at")
    token = current_recording.set(recording)
    try:
        for core in cores:
            made = ContextTracer().create_span(
                core["name"], core["attributes"], core["start_time"], TraceStatus(status_code="ERROR", description="d")
            )
            made.end_time = core["end_time"]
    finally:
        current_recording.reset(token)
    await recording.write()
    return recording.written


@pytest.mark.parametrize("fields", CORES)
async def test_span_equals_agent_lightnings(fields: dict[str, Any]) -> None:
    [ours] = await spans_of(fields)
    core = SpanCoreFields(**fields, status=TraceStatus(status_code="ERROR", description="d"))
    stock = Span.from_core_fields(core, rollout_id="ro", attempt_id="at", sequence_id=1)
    assert ours.context is not None
    assert (ours.context.trace_id, ours.context.span_id) == (ours.trace_id, ours.span_id)
    assert (len(ours.trace_id), len(ours.span_id)) == (32, 16)
    ids = {"trace_id": ours.trace_id, "span_id": ours.span_id}
    assert stock.context is not None
    stock = stock.model_copy(update={**ids, "context": stock.context.model_copy(update=ids)})
    assert ours == stock
    assert ours.model_dump_json(exclude_unset=True) == stock.model_dump_json(exclude_unset=True)
    assert Span.model_validate_json(ours.model_dump_json()) == ours


async def test_spans_share_no_mutable_state() -> None:
    first, second = await spans_of(CORES[0], CORES[0])
    assert (first.span_id, first.trace_id) != (second.span_id, second.trace_id)
    for name in ("attributes", "events", "links", "status", "context", "resource"):
        assert getattr(first, name) is not getattr(second, name), name
    assert first.context is not None
    assert second.context is not None
    assert first.context.trace_state is not second.context.trace_state
    assert first.resource.attributes is not second.resource.attributes


async def test_lone_surrogates_are_spelled_out() -> None:
    """JSON cannot encode them: the span, with its failure reason or reward, would be lost."""
    attributes = {"text": "caf\ud800 é", "texts": ["\udfff", "b"], "plain": "é"}
    [span] = await spans_of({"name": "x", "attributes": attributes, "start_time": 1.0, "end_time": 2.0})
    assert span.attributes == {"text": "caf\\ud800 é", "texts": ["\\udfff", "b"], "plain": "é"}
    assert Span.model_validate_json(span.model_dump_json()) == span
