"""A convolution over time and a gated norm."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional


class ShortConvolution(torch.nn.Module):
    """Causal within each sequence of a packed batch, with SiLU and without a bias."""

    def __init__(self, hidden_size: int, kernel_size: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(hidden_size, 1, kernel_size) * kernel_size**-0.5)

    def forward(self, x: torch.Tensor, cu_seqlens: Any = None, **_: Any) -> tuple[torch.Tensor, None]:
        parts = [x] if cu_seqlens is None else [x[:, first:last] for first, last in pairwise(cu_seqlens.tolist())]
        return torch.cat([functional.silu(self._of(part.transpose(1, 2)).transpose(1, 2)) for part in parts], 1), None

    def _of(self, part: torch.Tensor) -> torch.Tensor:
        channels, _, width = self.weight.shape
        return functional.conv1d(functional.pad(part, (width - 1, 0)), self.weight, groups=channels)


class FusedRMSNormGated(torch.nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps, self.weight = eps, torch.nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        wide = functional.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
        return (wide * functional.silu(gate.float())).to(x.dtype)
