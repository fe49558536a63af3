"""Metrics and a recorder of events, for the tests of this room."""

import math

from agl_slime.events import MetricValue

METRICS: dict[str, MetricValue] = {"rollout/reward_mean": 0.41, "rollout/count": 64, "rollout/failed": 0}
METRICS |= {"train/loss": -0.012, "train/logprob_diff_max": 1.2e-05, "train/first_ratio_dev_max": 3e-06}
METRICS |= {"perf/tokens_per_s": 1234.4, "perf/iteration_s": 0.312, "weights/version": 4}


def row(iteration: int, **metrics: MetricValue) -> dict[str, MetricValue]:
    reward = 1 / (1 + math.exp(5 - iteration / 4))
    spread = math.sqrt(reward * (1 - reward))
    values: dict[str, MetricValue] = {**METRICS, "rollout/reward_mean": reward, "rollout/reward_std": spread}
    values |= {"rollout/reward_min": 0.0, "rollout/reward_max": 1.0, "rollout/tokens_under_mask": 100}
    values |= {"train/tokens_trained": 100, "trace/forks": 1, "trace/retokenized": 0, "weights/version": iteration}
    return {**values, **metrics}
