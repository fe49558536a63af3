"""``Recording``: the spans of one attempt, and the context variable that assigns running code to it.

asyncio tasks and ``asyncio.to_thread`` inherit the variable, so spans of nested tasks and threads are added to the
rollout that started them. ``agl_slime.runner.process`` carries it into threads and executors that Python starts without
a context.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from agl_slime.support.agl_types import Span, SpanCoreFields, TraceStatus

logger = logging.getLogger(__name__)


class SpanStore(Protocol):
    """The store of a ``Recording``: a ``LightningStore``, say."""

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]], /) -> Sequence[int]: ...

    async def add_many_spans(self, spans: Sequence[Span], /) -> Sequence[Span]: ...


SpanBuilder = Callable[..., Span]
"""Called with rollout_id, attempt_id and sequence_id, once the store has numbered the span."""


@dataclass(eq=False)
class Recording:
    """The unwritten spans of one attempt, in the order of their ends. ``add`` is thread-safe. Written spans are kept in
    ``written``, unless the recording ``forgets`` them."""

    rollout_id: str
    attempt_id: str
    store: SpanStore | None = None
    closed: bool = False
    forgets: bool = False
    written: list[Span] = field(default_factory=list)
    _pending: list[SpanBuilder] = field(default_factory=list)
    _built: list[Span] = field(default_factory=list)  # numbered; a failed write may have stored them
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def add(self, builder: SpanBuilder) -> bool:
        """Keep a span for the next write; ``False`` when the attempt has ended."""
        with self._lock:
            if self.closed:
                return False
            self._pending.append(builder)
        return True

    def add_instant(self, name: str, attributes: dict[str, Any], time_s: float) -> None:
        """``add`` a span of no duration at ``time_s``, in seconds since the epoch."""
        status = TraceStatus(status_code="OK")
        core = SpanCoreFields(name=name, attributes=attributes, status=status, start_time=time_s, end_time=time_s)
        self.add(partial(Span.from_core_fields, core))

    async def write(self, *, close: bool = False) -> None:
        """Write the pending spans to the store, by one call for their numbers and one for the spans; ``close`` refuses
        later ones. After an error, which is raised, the next call writes them."""
        async with self._writing:
            with self._lock:
                pending, self._pending = self._pending, []
                self.closed = self.closed or close
            if pending or self._built:
                await self._write(pending)

    async def write_early(self) -> None:
        """``write`` while the attempt runs; a failed write is retried at its end."""
        try:
            await self.write()
        except Exception as error:
            logger.warning("Spans of rollout %s could not be written yet: %s", self.rollout_id, error)

    async def _write(self, pending: list[SpanBuilder]) -> None:
        """Build and write spans, each built once: a retry after a lost response must not look like another span."""
        key, ids = (self.rollout_id, self.attempt_id), {"rollout_id": self.rollout_id, "attempt_id": self.attempt_id}
        store, first = self.store, len(self.written) + len(self._built) + 1
        try:
            numbers: Sequence[int] = range(first, first + len(pending))
            if store is not None and pending:
                numbers = await store.get_many_span_sequence_ids([key] * len(pending))
        except BaseException:
            with self._lock:
                self._pending[:0] = pending
            raise
        self._built += [build(**ids, sequence_id=number) for build, number in zip(pending, numbers, strict=True)]
        # a store returns the spans that are new to it
        new = {s.span_id: s for s in await store.add_many_spans(self._built)} if store is not None else {}
        if store is None or not self.forgets:
            self.written += [new.get(span.span_id, span) for span in self._built]
        self._built = []


current_recording: ContextVar[Recording | None] = ContextVar("agl_slime_recording", default=None)
