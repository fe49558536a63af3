"""What the loop asks of a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Protocol, runtime_checkable

from agl_slime.types import Sample

TrainData = Mapping[str, Any]
"""The batch dict that slime's ``RolloutManager._convert_samples_to_train_data`` makes; see
:mod:`agl_slime.trainers.local.batch`."""


@runtime_checkable
class Trainer(Protocol):
    """Takes batches, hands out weights, and can be stopped and resumed. The methods are synchronous: call them from a
    thread, not from an event loop."""

    def train(
        self, batch: TrainData | Sequence[Sample] | Sequence[Sequence[Sample]], *, iteration: int
    ) -> dict[str, float]:
        """Train on one batch and return finite metrics named ``train/...``."""
        ...

    def save_weights(self, directory: str | PathLike[str]) -> None:
        """Write the current weights as a Hugging Face checkpoint that SGLang's ``/update_weights_from_disk`` takes."""
        ...

    def save(self, directory: str | PathLike[str]) -> None:
        """Write everything that training needs to go on from here."""
        ...

    def load(self, directory: str | PathLike[str]) -> None:
        """Go on from what :meth:`save` wrote."""
        ...
