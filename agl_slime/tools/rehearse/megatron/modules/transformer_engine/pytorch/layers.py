"""Norms and linear layers, with Megatron's communication of tensor and sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional


def _parallel() -> Any:
    from megatron.core import tensor_parallel  # which imports this module

    return tensor_parallel


class _Module(torch.nn.Module):
    fp8 = fp8_calibration = False

    def get_extra_state(self) -> torch.Tensor:
        """The state of fp8: empty, as Transformer Engine writes it without."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...


def _norm(hidden: torch.Tensor, weight: torch.Tensor, bias: Any, *, eps: float, centred: bool) -> torch.Tensor:
    """A layer norm with a bias, an RMS norm without."""
    wide, gain = hidden.float(), weight.float() + centred
    size = (hidden.shape[-1],)
    if bias is None:
        return functional.rms_norm(wide, size, gain, eps).to(hidden.dtype)
    return functional.layer_norm(wide, size, gain, bias.float(), eps).to(hidden.dtype)


class RMSNorm(_Module):
    _biased = False

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype = torch.float32,
        **_: Any,
    ) -> None:
        super().__init__()
        self.eps, self.centred = eps, zero_centered_gamma
        self.weight = _norm_parameter(hidden_size, params_dtype, sequence_parallel, 1.0 - zero_centered_gamma)
        self.bias = _norm_parameter(hidden_size, params_dtype, sequence_parallel, 0.0) if self._biased else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return _norm(hidden, self.weight, self.bias, eps=self.eps, centred=self.centred)


class LayerNorm(RMSNorm):
    _biased = True


def _norm_parameter(size: int, dtype: torch.dtype, sequence_parallel: bool, value: float) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.full((size,), value, dtype=dtype))
    parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
    return parameter


class Linear(_Module):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        init_method: Callable[[torch.Tensor], Any],
        parallel_mode: str | None = None,
        sequence_parallel: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        **_: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias = bias, return_bias
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.sequence_parallel = sequence_parallel and tp_size > 1 and parallel_mode is not None
        column, row = parallel_mode == "column", parallel_mode == "row"
        shape = out_features // (tp_size if column else 1), in_features // (tp_size if row else 1)
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=params_dtype))
        init_method(self.weight)
        _parallel().set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=int(row), stride=1)
        self.bias = torch.nn.Parameter(torch.zeros(shape[0], dtype=params_dtype)) if bias else None
        if self.bias is not None and column:
            _parallel().set_tensor_model_parallel_attributes(self.bias, is_parallel=True, dim=0, stride=1)
        elif self.bias is not None:
            self.bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        group, bias = self.tp_group, self.bias
        if self.parallel_mode == "column" and self.sequence_parallel:
            hidden = _parallel().gather_from_sequence_parallel_region(hidden, group=group)
        elif self.parallel_mode == "column":
            hidden = _parallel().copy_to_tensor_model_parallel_region(hidden, group=group)
        if self.parallel_mode != "row":
            output = functional.linear(hidden, self.weight, None if self.return_bias else bias)
            return (output, bias) if self.return_bias else output
        output = functional.linear(hidden, self.weight)
        reduce = _parallel().reduce_from_tensor_model_parallel_region
        if self.sequence_parallel:
            reduce = _parallel().reduce_scatter_to_sequence_parallel_region
        output = reduce(output, group=group)
        if self.return_bias:
            return output, bias
        return output if bias is None else output + bias


class LayerNormLinear(Linear):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype = torch.float32,
        **named: Any,
    ) -> None:
        both = {"sequence_parallel": sequence_parallel, "params_dtype": params_dtype}
        super().__init__(in_features, out_features, **both, **named)
        self.eps, self.centred = eps, zero_centered_gamma
        norm = in_features, params_dtype, sequence_parallel
        self.layer_norm_weight = _norm_parameter(*norm, 1.0 - zero_centered_gamma)
        self.layer_norm_bias = _norm_parameter(*norm, 0.0) if normalization == "LayerNorm" else None

    def forward(self, hidden: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        norm = {"eps": self.eps, "centred": self.centred}
        return super().forward(_norm(hidden, self.layer_norm_weight, self.layer_norm_bias, **norm))


class GroupedLinear(_Module):
    """A linear layer per expert; tokens come sorted by expert."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        init_method: Callable[[torch.Tensor], Any],
        parallel_mode: str | None = None,
        tp_size: int = 1,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        **_: Any,
    ) -> None:
        super().__init__()
        if bias:
            raise NotImplementedError("experts with biases do not run on a CPU: give --disable-bias-linear")
        self.num_gemms, self.use_bias, self.fp8_meta = num_gemms, bias, {"fp8_checkpoint": False, "recipe": None}
        self.in_features, self.out_features = in_features, out_features
        dim = int(parallel_mode == "row")
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
            init_method(weight)
            _parallel().set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=dim, stride=1)
            self.register_parameter(f"weight{number}", weight)

    def _get_weight_tensors(self) -> list[torch.Tensor]:  # which slime's patch of Megatron extends
        return [getattr(self, f"weight{number}") for number in range(self.num_gemms)]

    def forward(
        self, hidden: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> torch.Tensor:
        inputs = hidden.split(list(m_splits))
        return torch.cat([functional.linear(*pair) for pair in zip(inputs, self._get_weight_tensors(), strict=True)])
