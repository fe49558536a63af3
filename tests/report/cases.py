"""Metrics and a recorder of events, for the tests of this room."""

from __future__ import annotations

import math

from agl_slime.events import Event, MetricValue

METRICS: dict[str, MetricValue] = {
    "rollout/reward_mean": 0.41,
    "rollout/count": 64,
    "rollout/failed": 0,
    "train/loss": -0.012,
    "train/logprob_diff_max": 1.2e-05,
    "train/first_ratio_dev_max": 3e-06,
    "perf/tokens_per_s": 1234.4,
    "perf/iteration_s": 0.312,
    "weights/version": 4,
}


class Recorder:
    """Keeps the events that it handles."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def handle(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1


def row(iteration: int, **metrics: MetricValue) -> dict[str, MetricValue]:
    reward = 1 / (1 + math.exp(5 - iteration / 4))
    spread = math.sqrt(reward * (1 - reward))
    values: dict[str, MetricValue] = {
        **METRICS,
        "rollout/reward_mean": reward,
        "rollout/reward_std": spread,
        "rollout/reward_min": 0.0,
        "rollout/reward_max": 1.0,
        "rollout/tokens_under_mask": 100,
        "train/tokens_trained": 100,
        "trace/forks": 1,
        "trace/retokenized": 0,
        "weights/version": iteration,
    }
    return {**values, **metrics}
