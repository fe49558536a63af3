"""``metrics.jsonl``: one JSON object per iteration. The names below are those that the reporters read; a run may add
others."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agl_slime.report.artifact import Artifact
from agl_slime.report.events import Event, IterationFinished, MetricValue
from agl_slime.report.jsonl import IterationFile, iter_jsonl, jsonable

REWARD_MEAN = "rollout/reward_mean"  # mean over the rollouts of the iteration, one reward per rollout
REWARD_STD = "rollout/reward_std"
REWARD_MIN = "rollout/reward_min"
REWARD_MAX = "rollout/reward_max"
COUNT = "rollout/count"  # rollouts that ended in this iteration, failed ones included
FAILED = "rollout/failed"
RESPONSE_TOKENS = "rollout/response_tokens_mean"  # sampled tokens per rollout
TOKENS_UNDER_MASK = (
    "rollout/tokens_under_mask"  # tokens with loss mask 1, counted where the samples leave the data source
)
FORKS = "trace/forks"  # samples beyond the first of their rollout
RETOKENIZED = "trace/retokenized"  # samples whose ids are not the engine's
VAL_START_REWARD_MEAN = "val/start_reward_mean"  # validation before the first training step, in the first iteration
VAL_REWARD_MEAN = "val/reward_mean"  # validation with the weights after the iteration; only in iterations that have one
LOSS = "train/loss"
LOGPROB_DIFF_MAX = (
    "train/logprob_diff_max"  # max |trainer - engine| log-prob, in nats, before the first step on the batch
)
FIRST_RATIO_DEV_MAX = "train/first_ratio_dev_max"  # max |ratio - 1| in the first minibatch
TOKENS_TRAINED = (
    "train/tokens_trained"  # tokens with loss mask 1, counted by the trainer, once whatever the number of epochs
)
TOKENS_PER_S = "perf/tokens_per_s"  # sampled tokens per second of collecting
ITERATION_S = "perf/iteration_s"
WEIGHTS_VERSION = "weights/version"

REQUIRED_KEYS = (
    REWARD_MEAN,
    COUNT,
    FAILED,
    LOSS,
    LOGPROB_DIFF_MAX,
    FIRST_RATIO_DEV_MAX,
    TOKENS_PER_S,
    ITERATION_S,
    WEIGHTS_VERSION,
)


def number(metrics: Mapping[str, Any], key: str) -> float | None:
    """The metric as a finite number, or None when it is absent, text or not finite."""
    value = jsonable(metrics.get(key))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def clean(metrics: Mapping[str, MetricValue]) -> tuple[dict[str, Any], list[str]]:
    """The metrics as JSON can hold them, with None for the required ones that are missing; and the names of those that
    were NaN or infinite."""
    record: dict[str, Any] = dict.fromkeys(REQUIRED_KEYS)
    not_finite: list[str] = []
    for key, value in metrics.items():
        if key == "iteration":
            continue
        record[key] = jsonable(value)
        if record[key] is None and value is not None:
            not_finite.append(key)
    return record, not_finite


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The iterations in ``metrics.jsonl``; a last line torn by a kill is left out, any other broken line is a
    ``ConfigError``."""
    return list(iter_jsonl(path))


class MetricsWriter:
    """Writes ``metrics.jsonl``, each iteration flushed as it ends.

    ``warn(text, key)`` is told of values that are not finite; they are written as null.
    """

    def __init__(self, path: str | os.PathLike[str], *, warn: Callable[[str, str], None]) -> None:
        self._file = IterationFile(path)
        self._warn = warn

    def handle(self, event: Event) -> None:
        if isinstance(event, IterationFinished):
            record, not_finite = clean(event.metrics)
            self._file.append(event.iteration, [record])
            for key in not_finite:
                text = f"{key} is {_spell(event.metrics[key])} in iteration {event.iteration}; metrics.jsonl has null there."
                self._warn(text, f"not_finite:{key}")

    def close(self) -> None:
        self._file.close()

    def artifact(self) -> Artifact:
        return Artifact("metrics", Path(self._file.path), "no iteration was finished")


def _spell(value: Any) -> str:
    plain = float(value)
    return "NaN" if math.isnan(plain) else "infinite"
