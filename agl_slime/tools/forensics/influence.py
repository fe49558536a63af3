"""The influence of each rollout of a batch on a step: inner products of gradients.

TracIn (Pruthi et al. 2020, arXiv:2002.08484, eq. 1 and section 3.2): a gradient step with learning rate ``lr`` on an
example with gradient ``g`` changes the loss of another with gradient ``h`` by ``-lr g.h``, to first order. A large
model's gradients are sketched: a count sketch (Charikar, Chen and Farach-Colton 2002, "Finding Frequent Items in Data
Streams") of ``D`` numbers keeps inner products without bias, with a variance of at most ``2 |g|^2 |h|^2 / D``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agl_slime.types import Sample, flat_samples

if TYPE_CHECKING:
    from agl_slime.train.local.trainer import LocalTrainer

SKETCH = 1 << 16
"""Numbers of a sketched gradient."""
_MOST_BYTES = 1 << 30  # of all exact gradients of a batch


@dataclass(frozen=True, kw_only=True)
class Influences:
    """Inner products of the ``N`` rollouts' gradients, ``[N, N]`` in float64, in the order of ``rollouts``, the
    ``rollout_id`` of each. A step is a plain gradient step on the whole batch here; AdamW scales each weight."""

    rollouts: Sequence[int]
    on_loss: NDArray[np.float64]
    """``g_i . g_j``: per unit of the learning rate, by how much the step on rollout ``i`` lowers the loss of ``j``; on
    itself, the squared norm."""
    on_log_probs: NDArray[np.float64]
    """``-g_i . h_j``: per unit of the learning rate, by how much the step on ``i`` changes the sum of the log-probs of
    ``j``."""
    sketch: int = 0
    """Numbers per sketched gradient; 0: exact."""

    @property
    def shares(self) -> NDArray[np.float64]:
        """``[N]``: each rollout's share ``g_i . G / |G|^2`` of the step's decrease of the loss, where ``G`` is the sum
        of the gradients; 0 for a step without a gradient."""
        of_step = self.on_loss.sum(1)
        return of_step / total if (total := of_step.sum()) else of_step


def influences(
    trainer: LocalTrainer, batch: Sequence[Sample] | Sequence[Sequence[Sample]], *, sketch: int | None = None
) -> Influences:
    """The influences in ``batch`` at the trainer's weights, which stay as they are. ``sketch`` is the number of numbers
    per gradient, 0 for exact gradients; by default exact ones where they need at most 1 GiB. Raises ``TrainerError``
    as ``LocalTrainer.train``."""
    if sketch is None:
        n = len({sample.rollout_id for sample in flat_samples(batch)})
        weights = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
        sketch = 0 if 2 * n * weights * 4 <= _MOST_BYTES else SKETCH
    reduce = partial(count_sketch, size=sketch) if sketch else _flat
    gradients = trainer.rollout_gradients(batch, reduce)
    of_loss, of_log_probs = (
        np.stack([gradient.cpu().numpy() for gradient in column]).astype(np.float64)
        for column in zip(*gradients.values(), strict=True)
    )
    products: dict[str, Any] = {"on_loss": of_loss @ of_loss.T, "on_log_probs": -of_loss @ of_log_probs.T}
    return Influences(rollouts=[*gradients], sketch=sketch, **products)


def count_sketch(tensors: Sequence[Tensor], *, size: int) -> Tensor:
    """The count sketch of the concatenated ``tensors``, ``[size]``: each number is added, with a random sign, to a
    random place; equal for equal shapes."""
    drawn = torch.Generator().manual_seed(0)
    sketched = torch.zeros(size, dtype=torch.float64)
    for tensor in tensors:
        places = torch.randint(2 * size, (tensor.numel(),), generator=drawn)
        signs = (1 - 2 * (places % 2)).to(torch.float64)
        sketched.index_add_(0, places // 2, tensor.reshape(-1).cpu().double() * signs)
    return sketched


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
