"""Which rollout the running code belongs to, and the spans it has produced so far.

The current recording lives in a ``contextvars.ContextVar``: asyncio tasks and ``asyncio.to_thread`` inherit it, so
spans of nested tasks and of threads land on the rollout that started them, however many rollouts share the process.
``agl_slime.runner.process`` carries it into threads and executors that Python starts without a context.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from agl_slime.support.agl import LightningStore, Span

logger = logging.getLogger(__name__)

# Called with rollout_id, attempt_id and sequence_id, once the store has numbered the spans of an attempt.
SpanBuilder = Callable[..., Span]


@dataclass(eq=False)
class Recording:
    """The spans of one attempt that are not written yet, in the order in which they ended. Any thread may add. Those
    that are written stay in ``written``, unless it ``forgets`` what a store has."""

    rollout_id: str
    attempt_id: str
    store: LightningStore | None = None
    closed: bool = False
    forgets: bool = False
    written: list[Span] = field(default_factory=list)
    _pending: list[SpanBuilder] = field(default_factory=list)
    _built: list[Span] = field(default_factory=list)  # numbered; whether the store has them is not known
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def add(self, builder: SpanBuilder) -> bool:
        """Keep a span for the next write; ``False`` when the attempt is over and the span came too late."""
        with self._lock:
            if self.closed:
                return False
            self._pending.append(builder)
        return True

    async def write(self, *, close: bool = False) -> None:
        """Write what is there to the store, in one call each for the numbers and the spans; with ``close`` nothing is
        taken in after this. What could not be written stays for the next time, and the error is raised."""
        async with self._writing:
            with self._lock:
                pending, self._pending = self._pending, []
                self.closed = self.closed or close
            if pending or self._built:
                await self._write(pending)

    async def write_early(self) -> None:
        """``write`` while the attempt goes on; what fails is tried again at its end."""
        try:
            await self.write()
        except Exception as error:
            logger.warning("Spans of rollout %s could not be written yet: %s", self.rollout_id, error)

    async def _write(self, pending: list[SpanBuilder]) -> None:
        """What was built once stays as it is: a store that has a span already, of a write whose answer was lost, does
        not take it for another."""
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
        # a store returns those that it had not yet
        new = {s.span_id: s for s in await store.add_many_spans(self._built)} if store is not None else {}
        if store is None or not self.forgets:
            self.written += [new.get(span.span_id, span) for span in self._built]
        self._built = []


current_recording: ContextVar[Recording | None] = ContextVar("agl_slime_recording", default=None)
