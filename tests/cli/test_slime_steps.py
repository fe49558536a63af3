"""The loop's two functions over slime: full batches only, and no weight update without a step."""

from __future__ import annotations

from typing import Any

from agl_slime.cli.slime import SlimeSteps
from agl_slime.metric_names import TOKENS_TRAINED


class Source:
    def __init__(self) -> None:
        self.ready = 0

    @property
    def deliverable(self) -> int:
        return self.ready

    def get_samples(self, n: int) -> list[Any]:
        self.ready -= n
        return [[]] * n


class Trainer:
    first_rollout_id = 5
    updates = 3
    saved = None

    def __init__(self) -> None:
        self.trained: list[int] = []

    def train(self, rollout_id: int) -> int:
        self.trained.append(rollout_id)
        return 100

    def saves(self, rollout_id: int) -> bool:
        return False

    def update_weights(self) -> str:
        self.updates += 1
        return str(self.updates)


def test_a_short_batch_waits_for_the_next_iteration_and_nothing_is_dropped():
    source, trainer = Source(), Trainer()
    steps: Any = SlimeSteps(trainer=trainer, source=source, batch_size=4)  # type: ignore[arg-type]
    source.ready = 4
    assert steps.train(1)[TOKENS_TRAINED] == 100
    assert steps.sync(1) == "4"
    source.ready = 3  # a group was dropped
    assert steps.train(2) == {"train/waiting_groups": 3.0}
    assert steps.sync(2) == "4"
    source.ready += 4
    steps.train(3)
    assert steps.sync(3) == "5"
    assert trainer.trained == [5, 6]  # slime's numbers go on from its checkpoint, without a gap
    assert source.ready == 3
