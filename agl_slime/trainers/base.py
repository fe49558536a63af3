"""What the loop asks of a trainer."""

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
    """What a trainer made of a batch, each token as it first saw it (before any step on the token itself; the local
    trainer has taken those of earlier minibatches, but for ``old_log_probs`` of ``"recompute"``); one array per Sample,
    in the order of the batch, with an entry per token under the loss mask."""

    log_probs: list[NDArray[np.float32]]
    """Natural log, at the sampling temperature: what is compared with the engine's."""
    advantages: list[NDArray[np.float32]]


@runtime_checkable
class HasTokenScores(Protocol):
    """A trainer that tells what it made of single tokens, for those who look at a run."""

    scores: TokenScores | None
    """Of the batch that ``train`` was given last."""


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
