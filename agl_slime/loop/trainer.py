"""The trainer interface of the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from agl_slime.types import Sample


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """A trainer's scores of the tokens of a batch, before any optimizer step on the token itself (the local trainer may
    have taken steps on earlier minibatches, unless ``old_log_probs`` is ``"recompute"``); one array per Sample, in the
    order of the batch, with an entry per token under the loss mask."""

    log_probs: list[NDArray[np.float32]]
    """Natural log, at the sampling temperature, for comparison with the engine's."""
    advantages: list[NDArray[np.float32]]
    entropy: list[NDArray[np.float32]] | None = None


@runtime_checkable
class Trainer(Protocol):
    """A trainer that can be stopped and resumed. The methods block: call them from a thread."""

    def train(self, batch: Sequence[Sample] | Sequence[Sequence[Sample]], *, iteration: int) -> dict[str, float]:
        """Train on one batch and return finite metrics named ``train/...``."""
        ...

    def save_weights(self, directory: str | PathLike[str]) -> None:
        """Write the current weights as a Hugging Face checkpoint for SGLang's ``/update_weights_from_disk``."""
        ...

    def save(self, directory: str | PathLike[str]) -> None:
        """Write the complete training state."""
        ...

    def load(self, directory: str | PathLike[str]) -> None:
        """Resume from a directory of :meth:`save`."""
        ...
