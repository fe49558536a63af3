"""TensorBoard event files, through TensorBoard's own writer, which needs neither torch nor TensorFlow.

Without TensorBoard this reporter does nothing and says so at the end.
"""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agl_slime.report.artifact import Artifact
from agl_slime.report.events import Event, IterationFinished, RunFinished
from agl_slime.report.metrics import number

NOT_INSTALLED = 'TensorBoard is not installed; pip install "agl-slime[report]" writes its event files as well.'


class TensorBoardWriter:
    """One scalar per metric and iteration, flushed as the iteration ends. TensorBoard (0.3 s to import) is loaded at
    the first iteration."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._installed = find_spec("tensorboard") is not None
        self._writer: Any = None

    def handle(self, event: Event) -> None:
        if not self._installed:
            return
        if isinstance(event, IterationFinished):
            self._write(event)
        elif isinstance(event, RunFinished):
            self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def artifact(self) -> Artifact:
        return Artifact(
            "tensorboard", self._directory, "no iteration was finished" if self._installed else NOT_INSTALLED
        )

    def _write(self, event: IterationFinished) -> None:
        # protobuf makes these classes at run time, so a type checker cannot see them
        from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.event_pb2 import SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._writer = EventFileWriter(str(self._directory))
            # a resumed run writes iterations again: from this step on, the points of the interrupted one are discarded
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(TensorBoardEvent(step=event.iteration, wall_time=time.time(), session_log=start))
        scalars = {key: number(event.metrics, key) for key in event.metrics if key != "iteration"}
        values = [Summary.Value(tag=key, simple_value=value) for key, value in scalars.items() if value is not None]
        self._writer.add_event(
            TensorBoardEvent(step=event.iteration, wall_time=time.time(), summary=Summary(value=values))
        )
        self._writer.flush()
