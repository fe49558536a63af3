"""Passes the events of a run to its reporters, and the standard reporters of a run directory."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Self

from rich.console import Console

from agl_slime.events import Event, Reporter, RolloutFinished, RunFinished, RunStarted, Warning
from agl_slime.report.console import ProgressReporter, View
from agl_slime.report.files import RunDir, write_alive
from agl_slime.report.metrics import MetricsWriter, TensorBoardWriter
from agl_slime.report.rollouts import Keep, RolloutWriter
from agl_slime.report.summary import ModelOfRun, Output, SummaryReporter
from agl_slime.report.trackers import Tracker, make_trackers
from agl_slime.support.terminal import PlainConsole

logger = logging.getLogger(__name__)


class Reporters:
    """Passes each event to every reporter in order, on a separate thread: event loops that serve rollouts never wait
    for a disk or a terminal.

    A reporter that raises is dropped with one ``Warning``. With more than ``backlog`` pending events, rollout events
    are dropped and counted. ``handle`` may be called from any thread and never waits.
    """

    def __init__(self, reporters: Iterable[Reporter] = (), *, backlog: int = 100_000) -> None:
        self._reporters: tuple[Reporter, ...] = tuple(reporters)
        self._backlog = backlog
        self._dropped = 0
        self._queue: queue.SimpleQueue[Event | threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="agl-slime-report", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def handle(self, event: Event) -> None:
        """Pass the event on; after ``close`` it is ignored."""
        if isinstance(event, RolloutFinished) and self._queue.qsize() >= self._backlog:
            self._dropped += 1
        else:
            self._queue.put(event)

    def warn(self, text: str, key: str) -> None:
        """Report a ``Warning``: at once if a reporter calls this, so that the end of the run cannot overtake it."""
        event = Warning(text=text, key=key)
        if threading.current_thread() is self._thread:
            self._dispatch(event)
        else:
            self._queue.put(event)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until all earlier events are handled; False if that takes longer than ``timeout_s``."""
        handled = threading.Event()
        self._queue.put(handled)
        return handled.wait(timeout_s)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Handle pending events and close the reporters; False if that takes longer than ``timeout_s``."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            if isinstance(item, RunFinished) and self._dropped:
                why = "because reporting fell behind; counts by outcome are too low by this number."
                self.warn(f"{self._dropped} rollout events were left out {why}", "left_out")
            self._dispatch(item)
        for reporter in self._reporters:
            self._close(reporter)

    def _dispatch(self, event: Event) -> None:
        for reporter in self._reporters:
            try:
                reporter.handle(event)
            except (Exception, SystemExit) as error:  # as Rich's console ends on a closed pipe
                if reporter in self._reporters:  # else it failed again, on its own warning
                    self._drop(reporter, error)

    def _drop(self, reporter: Reporter, error: BaseException) -> None:
        self._reporters = tuple(each for each in self._reporters if each is not reporter)
        name = type(reporter).__name__
        text = f"{name} stopped with {type(error).__name__}: {error}; the run continues without it."
        logger.debug("%s failed", name, exc_info=error)
        self._close(reporter)
        if self._reporters:
            self.warn(text, f"reporter:{name}")
        else:
            logger.warning("%s", text)

    def _close(self, reporter: Reporter) -> None:
        try:
            reporter.close()
        except Exception as error:
            logger.warning("%s could not be closed: %r", type(reporter).__name__, error)


class StandardReporters(Reporters):
    """All reporters of a run directory. Rollouts are kept once ``rollouts.tokenizer`` is set, by ``keep`` (see
    ``RolloutWriter``); ``track`` names trackers; ``began`` is the run's start (``time.monotonic()``), by default now.
    """

    def __init__(
        self,
        run: RunDir,
        *,
        console: Console | None = None,
        view: View = "auto",
        seed: int = 0,
        began: float | None = None,
        keep: Keep = "sampled",
        track: Sequence[Tracker] = (),
    ) -> None:
        self._run = run
        write_alive(run)
        self._began = time.monotonic() if began is None else began
        console = console or PlainConsole()
        metrics = MetricsWriter(run.metrics, warn=self.warn)
        tensorboard = TensorBoardWriter(run.tensorboard)
        self.rollouts = rollouts = RolloutWriter(run, keep=keep, seed=seed, warn=self.warn)
        progress = ProgressReporter(console=console, view=view)
        outputs: dict[str, Output] = {"metrics": metrics, "tensorboard": tensorboard}
        outputs |= {"rollouts": rollouts, "model": ModelOfRun(run.model)}
        trackers = make_trackers(track, run)
        outputs |= {name: tracker for name, tracker in trackers.items() if isinstance(tracker, Output)}
        summary = SummaryReporter(run, outputs=outputs, console=console)
        # groups before metrics: after a kill no iteration has metrics without groups; the summary last: it lists files
        super().__init__((rollouts, metrics, tensorboard, *trackers.values(), progress, summary))

    def handle(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            event = replace(event, output_dir=self._run.path, at=self._began)
        super().handle(event)

    def close(self, timeout_s: float = 30.0) -> bool:
        try:
            return super().close(timeout_s)
        finally:
            self._run.alive.unlink(missing_ok=True)
