"""What the loop asks of a trainer."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Protocol, runtime_checkable

from agl_slime.types import Sample


@runtime_checkable
class Trainer(Protocol):
    """Takes batches, gives weights, and can be stopped and resumed. The methods block: call them from a thread."""

    def train(self, batch: Sequence[Sample] | Sequence[Sequence[Sample]], *, iteration: int) -> dict[str, float]:
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
