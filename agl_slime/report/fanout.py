"""Brings the events of a run to its reporters.

The loop calls ``Reporters.handle`` and goes on: a thread hands the events on in order, so that no disk or terminal
stands on an event loop that serves rollouts.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agl_slime.report.events import Event, Reporter, RolloutFinished, RunFinished, Warning

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Flush:
    done: threading.Event


class Reporters:
    """Hands each event to every reporter, on a thread of its own, in the order of the calls.

    A reporter that raises is dropped with one ``Warning``; the others and the run go on. When reporting falls more than
    ``backlog`` events behind, rollout events are left out and counted, so that memory stays bounded; the other events,
    a few per iteration, are always kept. ``handle`` may be called from any thread and never waits.
    """

    def __init__(self, reporters: Iterable[Reporter] = (), *, backlog: int = 100_000) -> None:
        self._reporters: tuple[Reporter, ...] = tuple(reporters)
        self._backlog = backlog
        self._left_out = 0
        self._queue: queue.SimpleQueue[Event | _Flush | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, reporter: Reporter) -> None:
        """Add a reporter; it sees the events from now on, after the reporters that were there before."""
        self._reporters = (*self._reporters, reporter)

    def handle(self, event: Event) -> None:
        """Pass the event on; after ``close`` it is ignored."""
        if isinstance(event, RolloutFinished) and self._queue.qsize() >= self._backlog:
            self._left_out += 1
            return
        self._put(event)

    def warn(self, text: str, key: str) -> None:
        """Report a ``Warning``. From a reporter it reaches the others at once, so that it is not overtaken by the end
        of the run."""
        event = Warning(text=text, key=key)
        if threading.current_thread() is self._thread:
            self._dispatch(event)
        else:
            self._put(event)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until the events passed so far are handled; False when that takes longer than ``timeout_s``."""
        if self._closed or self._thread is None:
            return True
        marker = _Flush(threading.Event())
        self._queue.put(marker)
        return marker.done.wait(timeout_s)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Handle what is left, close the reporters; False when that takes longer than ``timeout_s``. A second call only
        waits again."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._start()
                self._queue.put(None)
        assert self._thread is not None
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, event: Event) -> None:
        with self._lock:
            if not self._closed:
                self._start()
                self._queue.put(event)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="agl-slime-report", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Flush):
                item.done.set()
                continue
            if isinstance(item, RunFinished) and self._left_out:
                self.warn(
                    f"{self._left_out} rollout events were left out because reporting fell behind; counts by outcome are too low by that many.",
                    "left_out",
                )
            self._dispatch(item)
        for reporter in self._reporters:
            try:
                reporter.close()
            except Exception as error:
                logger.warning("%s could not be closed: %s: %s", type(reporter).__name__, type(error).__name__, error)

    def _dispatch(self, event: Event) -> None:
        for reporter in self._reporters:
            try:
                reporter.handle(event)
            except Exception as error:
                self._drop(reporter, error)

    def _drop(self, reporter: Reporter, error: Exception) -> None:
        if not any(known is reporter for known in self._reporters):
            return  # it failed again on its own warning
        self._reporters = tuple(known for known in self._reporters if known is not reporter)
        name = type(reporter).__name__
        text = f"{name} stopped with {type(error).__name__}: {error}; the run goes on without it."
        logger.debug("%s failed", name, exc_info=error)
        try:
            reporter.close()
        except Exception as second:
            logger.debug("%s could not be closed either: %s", name, second)
        if self._reporters:
            self.warn(text, f"reporter:{name}")
        else:
            logger.warning("%s", text)
