"""Agent Lightning's data types that a gateway needs. Where Agent Lightning is not installed, they have the same fields
and the same JSON: the recorder works without it.
"""

from __future__ import annotations

import secrets
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or find_spec("agentlightning") is not None:
    from agl_slime.support.agl import LLM, NamedResources, ProxyLLM, Rollout, Span, SpanCoreFields, TraceStatus
else:
    from pydantic import BaseModel, ConfigDict, Field

    class LLM(BaseModel):
        endpoint: str
        model: str
        api_key: str | None = None
        sampling_parameters: dict[str, Any] = Field(default_factory=dict)

    class ProxyLLM(LLM):
        """No recorder has one."""

    NamedResources = dict[str, LLM]

    class TraceStatus(BaseModel):
        status_code: str
        description: str | None = None

    class SpanCoreFields(BaseModel):
        name: str
        status: TraceStatus
        attributes: dict[str, Any]
        start_time: float | None
        end_time: float | None

    class Span(SpanCoreFields):
        model_config = ConfigDict(extra="allow")

        rollout_id: str
        attempt_id: str
        sequence_id: int
        trace_id: str
        span_id: str
        parent_id: str | None = None
        events: list[Any] = Field(default_factory=list)
        links: list[Any] = Field(default_factory=list)
        context: Any = None
        parent: Any = None
        resource: dict[str, Any] = Field(default_factory=lambda: {"attributes": {}, "schema_url": ""})

        @classmethod
        def from_core_fields(cls, core: SpanCoreFields, **ids: Any) -> Span:
            return cls(**core.model_dump(), **ids, trace_id=secrets.token_hex(16), span_id=secrets.token_hex(8))

    class Rollout(BaseModel):
        rollout_id: str
        input: Any
        start_time: float
        mode: str | None = None
        metadata: dict[str, Any] | None = None
