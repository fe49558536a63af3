"""The trainer's use of this machine: device, number format, threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, TypeVar

import torch

from agl_slime.errors import ConfigError
from agl_slime.support.threads import usable_cores

F = TypeVar("F", bound=Callable[..., Any])

_SMALL_MODEL = 5_000_000  # parameters; below, a second thread costs more than it gains


def torch_device(name: str) -> torch.device:
    """The device of that name; ``auto`` is CUDA if available. Raises ``ConfigError`` for a device that torch cannot
    use."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without CUDA
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device is {name!r}, which torch cannot use here ({reason}); 'cpu' always works.") from error
    return device


def has_bfloat16(device: torch.device) -> bool:
    """Whether the hardware has instructions for bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def bfloat16_wanted(setting: Literal["auto", "float32", "bfloat16"], device: torch.device) -> bool:
    """Whether to compute in bfloat16. Raises ``ConfigError`` if requested on hardware that would emulate it."""
    has = has_bfloat16(device)
    if setting == "bfloat16" and not has:
        raise ConfigError(
            f"compute_dtype is 'bfloat16', which the {device.type} here has no instructions for; use 'auto'."
        )
    return has and (setting == "bfloat16" or (setting == "auto" and device.type == "cuda"))


def set_threads(setting: int | Literal["auto"] | None, model: torch.nn.Module) -> None:
    """Set torch's CPU threads for the whole process; ``None`` leaves them alone. ``auto`` stays within
    ``OMP_NUM_THREADS``, if set."""
    if setting is None:
        return
    if setting == "auto":
        small = sum(parameter.numel() for parameter in model.parameters()) < _SMALL_MODEL
        setting = 1 if small else usable_cores()
    torch.set_num_threads(setting)


def in_own_thread(method: F) -> F:
    """``method``, run in the ``thread`` of its object for callers of any thread."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.thread.submit(method, self, *args, **kwargs).result()

    return call  # type: ignore[return-value]
