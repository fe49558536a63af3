"""Which rollout the running code belongs to, and the spans it has produced so far.

The current recording lives in a ``contextvars.ContextVar``: asyncio tasks and ``asyncio.to_thread`` inherit it, so spans of nested tasks and of
threads land on the rollout that started them, however many rollouts share the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from agl_slime._agl import Span

# A span is built once its sequence id is known: the store numbers the spans of an attempt when they are written.
SpanBuilder = Callable[[str, str, int], Span]


@dataclass(eq=False)
class Recording:
    """The spans of one attempt that are not written yet, in the order in which they ended. Any thread may add."""

    rollout_id: str
    attempt_id: str
    closed: bool = False
    written: list[Span] = field(default_factory=list)
    _pending: list[SpanBuilder] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, builder: SpanBuilder) -> bool:
        """Keep a span for the next write; ``False`` when the attempt is over and the span came too late."""
        with self._lock:
            if self.closed:
                return False
            self._pending.append(builder)
            return True

    def take(self, *, close: bool = False) -> list[SpanBuilder]:
        """The spans to write now; with ``close`` none are taken in after this."""
        with self._lock:
            pending, self._pending = self._pending, []
            self.closed = self.closed or close
            return pending


current_recording: ContextVar[Recording | None] = ContextVar("agl_slime_recording", default=None)
