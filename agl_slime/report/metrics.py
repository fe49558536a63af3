"""``metrics.jsonl``, one JSON object per iteration, and the same for TensorBoard. The names below are those that the
reporters read; a run may add others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agl_slime.report.events import Event, IterationFinished
from agl_slime.report.files import IterationFile, iter_jsonl, jsonable

REWARD_MEAN = "rollout/reward_mean"  # mean over the rollouts of the iteration, one reward per rollout
REWARD_STD = "rollout/reward_std"
REWARD_MIN = "rollout/reward_min"
REWARD_MAX = "rollout/reward_max"
COUNT = "rollout/count"  # rollouts that ended in this iteration, failed ones included
FAILED = "rollout/failed"
RESPONSE_TOKENS = "rollout/response_tokens_mean"  # sampled tokens per rollout
TRAINED_TOKENS_MEAN = "rollout/response_tokens_mean_trained"  # the same of rollouts that go to the trainer
DROPPED_TOKENS_MEAN = "rollout/response_tokens_mean_dropped"  # and of all others: failed, or of a dropped group
TOKENS_UNDER_MASK = "rollout/tokens_under_mask"  # tokens with loss mask 1 in the samples that leave the data source
FORKS = "trace/forks"  # samples beyond the first of their rollout
RETOKENIZED = "trace/retokenized"  # samples whose ids are not the engine's
VAL_START_REWARD_MEAN = "val/start_reward_mean"  # validation before the first training step, in the first iteration
VAL_REWARD_MEAN = "val/reward_mean"  # validation with the weights after the iteration; only in iterations that have one
LOSS = "train/loss"
LOGPROB_DIFF_MAX = (
    "train/logprob_diff_max"  # max |trainer - engine| log-prob, in nats, before the batch's first step (see train)
)
FIRST_RATIO_DEV_MAX = "train/first_ratio_dev_max"  # max |ratio - 1| in the first minibatch
TOKENS_TRAINED = "train/tokens_trained"  # tokens with loss mask 1, counted by the trainer, once for all epochs
TOKENS_PER_S = "perf/tokens_per_s"  # sampled tokens per second of collecting
ITERATION_S = "perf/iteration_s"
STALENESS_MEAN = "rollout/staleness_mean"  # versions that sampled tokens are behind the weights that train on them
STALENESS_MAX = "rollout/staleness_max"
TRAIN_S, SYNC_S = "perf/train_s", "perf/sync_s"
ROLL_S = "perf/roll_s"  # overlapped: seconds of the iteration in which training rollouts were in flight, syncs left out
TRAINER_WAITED = "perf/trainer_waited"  # overlapped: share of the iteration in which training waited for rollouts
ENGINE_WAITED = "perf/engine_waited"  # overlapped: share of it in which no rollout was in flight, for want of a place
CPU_BUSY = "perf/cpu_busy"  # overlapped: share of this machine's CPU that was busy in the iteration, with all programs
VAL_LAG = "val/lag"  # overlapped: versions that came while the validation ran; 0 on an engine of its own
WEIGHTS_VERSION = "weights/version"

REQUIRED_KEYS = (REWARD_MEAN, COUNT, FAILED, LOSS, LOGPROB_DIFF_MAX, FIRST_RATIO_DEV_MAX, TOKENS_PER_S, ITERATION_S)
REQUIRED_KEYS += (WEIGHTS_VERSION,)
_NO_TENSORBOARD = 'TensorBoard is not installed; pip install "agl-slime[report]" writes its event files as well.'


def number(metrics: Mapping[str, Any], key: str) -> float | None:
    """The metric as a finite number, or None when it is absent, text or not finite."""
    value = jsonable(metrics.get(key))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The iterations in ``metrics.jsonl`` (see ``iter_jsonl``)."""
    return list(iter_jsonl(path))


class MetricsWriter:
    """Writes ``metrics.jsonl``, each iteration flushed as it ends; required metrics that are missing are null.

    ``warn(text, key)`` is told of values that are not finite; they are written as null.
    """

    note = "no iteration was finished"

    def __init__(self, path: str | os.PathLike[str], *, warn: Callable[[str, str], None]) -> None:
        self.path = Path(path)
        self._file = IterationFile(path)
        self._warn = warn

    def handle(self, event: Event) -> None:
        if not isinstance(event, IterationFinished):
            return
        given = {key: value for key, value in event.metrics.items() if key != "iteration"}
        record = {**dict.fromkeys(REQUIRED_KEYS), **jsonable(given)}
        self._file.append(event.iteration, [record])
        for key, value in given.items():
            if record[key] is None and value is not None:
                what = "NaN" if value != value else "infinite"
                text = f"{key} is {what} in iteration {event.iteration}; metrics.jsonl has null there."
                self._warn(text, f"not_finite:{key}")

    def close(self) -> None:
        self._file.close()


class TensorBoardWriter:
    """One scalar per metric and iteration, through TensorBoard's own writer, which needs neither torch nor TensorFlow.
    It takes 0.3 s to import and is loaded at the first iteration; without it nothing is written."""

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
            # a resumed run writes iterations again: from this step on, the points of the interrupted one are discarded
            start = proto.SessionLog(status=proto.SessionLog.START)
            self._writer.add_event(proto.Event(step=event.iteration, wall_time=time.time(), session_log=start))
        scalars = {key: number(event.metrics, key) for key in event.metrics if key != "iteration"}
        summary: Any = summary_pb2.Summary  # pyright: ignore[reportAttributeAccessIssue]
        values = [summary.Value(tag=key, simple_value=value) for key, value in scalars.items() if value is not None]
        self._writer.add_event(proto.Event(step=event.iteration, wall_time=time.time(), summary=summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
