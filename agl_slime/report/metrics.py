"""``metrics.jsonl``, one JSON object per iteration, and the same for TensorBoard (names: ``metric_names``)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agl_slime import metric_names as m
from agl_slime.events import Event, IterationFinished
from agl_slime.report.files import IterationFile, iter_jsonl, jsonable

_NO_TENSORBOARD = 'TensorBoard is not installed; pip install "agl-slime[report]" writes its event files as well.'


def number(metrics: Mapping[str, Any], key: str) -> float | None:
    """The metric as a finite number; None for other values."""
    value = jsonable(metrics.get(key))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of an iteration, without its own."""
    return {key: value for key in metrics if key != "iteration" and (value := number(metrics, key)) is not None}


@dataclass(frozen=True)
class Validation:
    """A validation: ``mean`` over the ``rewarded`` of its ``count`` rollouts; None where the file lacks them.
    ``difference``: to the run's first validation, task by task, as mean, low and high."""

    mean: float | None
    interval: tuple[float, float] | None
    rewarded: int | None
    count: int | None
    difference: tuple[float, float, float] | None = None

    def format(self, digits: int) -> str:
        """``0.44``, or ``0.44 of 15/16`` if a rollout failed."""
        text = "-" if self.mean is None else f"{self.mean:.{digits}f}"
        return text if self.rewarded == self.count else f"{text} of {self.rewarded}/{self.count}"


def validation_of(metrics: Mapping[str, Any], *, start: bool = False) -> Validation | None:
    """The validation after the iteration, or at the start; ``None`` without one."""
    names = (m.VAL_START_REWARD_MEAN, *m.VAL_START_INTERVAL, m.VAL_START_COUNT, m.VAL_START_FAILED)
    if not start:
        names = (m.VAL_REWARD_MEAN, *m.VAL_INTERVAL, m.VAL_COUNT, m.VAL_FAILED)
    mean, low, high, count, failed = (number(metrics, name) for name in names)
    if mean is None and not count:
        return None
    rewarded = None if count is None else round(count - (failed or 0))
    interval = None if low is None or high is None else (low, high)
    of_tasks = [value for name in m.VAL_DIFFERENCE if not start and (value := number(metrics, name)) is not None]
    difference = (of_tasks[0], of_tasks[1], of_tasks[2]) if len(of_tasks) == len(m.VAL_DIFFERENCE) else None
    return Validation(mean, interval, rewarded, None if count is None else round(count), difference)


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The iterations in ``metrics.jsonl`` (see ``iter_jsonl``)."""
    return list(iter_jsonl(path))


class MetricsWriter:
    """Writes ``metrics.jsonl``, flushed after each iteration. Missing required metrics and values that are not finite
    are null; ``warn(text, key)`` is called for the latter."""

    note = "no iteration was finished"

    def __init__(self, path: str | os.PathLike[str], *, warn: Callable[[str, str], None]) -> None:
        self.path = Path(path)
        self._file = IterationFile(path)
        self._warn = warn

    def handle(self, event: Event) -> None:
        if not isinstance(event, IterationFinished):
            return
        metrics = {key: value for key, value in event.metrics.items() if key != "iteration"}
        record = {**dict.fromkeys(m.REQUIRED_KEYS), **jsonable(metrics)}
        self._file.append(event.iteration, [record])
        for key, value in metrics.items():
            if record[key] is None and value is not None:
                kind = "NaN" if value != value else "infinite"
                text = f"{key} is {kind} in iteration {event.iteration}; metrics.jsonl has null there."
                self._warn(text, f"not_finite:{key}")

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """One scalar per metric and iteration, through TensorBoard's own writer, which needs neither torch nor TensorFlow
    and is imported (0.3 s) at the first iteration. Without TensorBoard nothing is written."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.path = Path(directory)
        self._installed = find_spec("tensorboard") is not None
        self.note = "no iteration was finished" if self._installed else _NO_TENSORBOARD
        self._writer: Any = None

    def handle(self, event: Event) -> None:
        if not self._installed or not isinstance(event, IterationFinished):
            return
        # protobuf makes these classes at run time, so a type checker cannot see them
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        proto: Any = event_pb2
        if self._writer is None:
            self.path.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(self.path))
            # of a resumed run: discards the points of the interrupted run from this step on
            start = proto.SessionLog(status=proto.SessionLog.START)
            self._writer.add_event(proto.Event(step=event.iteration, wall_time=time.time(), session_log=start))
        summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        values = [summary.Value(tag=key, simple_value=value) for key, value in scalars(event.metrics).items()]
        self._writer.add_event(proto.Event(step=event.iteration, wall_time=time.time(), summary=summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
