"""What the tests of the report room share."""

from __future__ import annotations

from agl_slime.report.events import Event, MetricValue

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
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def handle(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1
