"""CUDA's names in torch, answered by the CPU and gloo, for Megatron-LM and slime, which call them everywhere."""

from __future__ import annotations

import functools
import os
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from agl_slime.errors import ConfigError

VARIABLES = {
    "TORCHDYNAMO_DISABLE": "1",  # torch.compile would call a C++ compiler for slime's losses
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asserts it under tensor parallelism
    "SLIME_DESTROY_WORLD_PROCESS_GROUP": "0",  # torch 2.13 does not create gloo's WORLD a second time
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray would hide the logical GPUs from its actors
    "SLIME_HOST_IP": "127.0.0.1",
}
_MEMORY = 1 << 34
_NOTHING = """synchronize empty_cache set_device _lazy_init init ipc_collect reset_peak_memory_stats set_stream
    manual_seed_all"""
_ZERO = "memory_allocated memory_reserved max_memory_allocated max_memory_reserved"
_FACTORIES = """arange as_tensor empty empty_like full full_like linspace ones ones_like rand rand_like randint randn
    randn_like randperm tensor zeros zeros_like"""


def install() -> None:
    """Patch this process's torch, before Megatron is imported. Raises ``ConfigError`` where torch has a GPU."""
    os.environ.update(VARIABLES)
    import torch

    if hasattr(torch, "_agl_slime_on_cpu"):
        return
    if torch.cuda.is_available():
        raise ConfigError(
            "this machine has a GPU: run slime's script itself, without agl_slime.tools.rehearse.megatron"
        )
    torch._agl_slime_on_cpu = True  # type: ignore[attr-defined]
    _answer_cuda(torch)
    _make_on_cpu(torch)
    _reduce_by_gloo(torch.distributed)
    name = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    kernels = ModuleType(name)  # kernels in triton, which has no CPU; its import is not guarded
    kernels.enable_batch_invariant_mode = lambda: None  # type: ignore[attr-defined]
    kernels.is_batch_invariant_mode_enabled = lambda: False  # type: ignore[attr-defined]
    sys.modules[name] = kernels


def _answer_cuda(torch: Any) -> None:
    """``torch.cuda``: one device without streams, memory or counters."""

    def constant(value: Any) -> Any:  # a function for each name
        return lambda *_, **__: value

    class Stream:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return constant(True if name == "query" else 0.0 if name == "elapsed_time" else None)

        def record_event(self, *_: Any) -> Stream:
            return Stream()

    class Generators:
        def __getitem__(self, _: Any) -> Any:
            return torch.default_generator

    cuda, cpu = torch.cuda, torch.device("cpu")
    properties = SimpleNamespace(name="cpu", total_memory=_MEMORY, multi_processor_count=1, major=9, minor=0)
    answers = dict.fromkeys(_NOTHING.split()) | dict.fromkeys(_ZERO.split(), 0)
    answers |= {"current_device": cpu, "device_count": 1, "get_device_name": "cpu", "get_device_capability": (9, 0)}
    answers |= {"mem_get_info": (_MEMORY, _MEMORY), "memory_stats": {}, "get_device_properties": properties}
    answers |= {"is_current_stream_capturing": False, "stream": nullcontext(), "device": nullcontext()}
    answers |= {"current_stream": Stream(), "default_stream": Stream()}
    for name, value in answers.items():
        setattr(cuda, name, constant(value))
    cuda.nvtx.range_push = cuda.nvtx.range_pop = torch._C._host_emptyCache = constant(None)
    cuda.Stream = cuda.Event = Stream
    cuda.default_generators = Generators()
    cuda._lazy_call = lambda call, **_: call()
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _make_on_cpu(torch: Any) -> None:
    """Tensors asked for on a GPU, or in pinned memory, are on the CPU."""
    cpu = torch.device("cpu")

    def device_of(device: Any) -> Any:
        return cpu if isinstance(device, int) or str(device).startswith("cuda") else device

    def on_cpu(original: Any) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **named: Any) -> Any:
            named.pop("pin_memory", None)
            return original(*args, **named | ({"device": device_of(named["device"])} if "device" in named else {}))

        return wrapper

    for name in _FACTORIES.split():
        setattr(torch, name, on_cpu(getattr(torch, name)))
    to, kind, load = torch.Tensor.to, torch.Tensor.type, torch.load

    def moved(self: Any, *args: Any, **named: Any) -> Any:
        if args and isinstance(args[0], int | str | torch.device):
            args = (device_of(args[0]), *args[1:])
        return to(self, *args, **named | ({"device": device_of(named["device"])} if "device" in named else {}))

    def typed(self: Any, *args: Any, **named: Any) -> Any:
        name = kind(self, *args, **named)  # Megatron compares the name with CUDA's
        return name.replace("torch.", "torch.cuda.", 1) if isinstance(name, str) else name

    torch.Tensor.to, torch.Tensor.type = moved, typed
    torch.Tensor.cuda = torch.Tensor.pin_memory = torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.load = lambda *args, **named: load(*args, **named | {"map_location": "cpu"})


def _reduce_by_gloo(dist: Any) -> None:
    """gloo has neither an average nor devices of a barrier; Megatron turns split sizes on a GPU into lists."""
    barrier, exchange = dist.barrier, dist.all_to_all_single
    dist.barrier = lambda group=None, async_op=False, device_ids=None: barrier(group=group, async_op=async_op)

    def exchanged(output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **named: Any):
        sizes = (
            list(map(int, split)) if split is not None else None for split in (output_split_sizes, input_split_sizes)
        )
        return exchange(output, input, *sizes, **named)

    dist.all_to_all_single = exchanged

    def averaging(original: Any) -> Any:
        @functools.wraps(original)
        def reduced(output: Any, *args: Any, **named: Any) -> Any:
            if named.get("op") != dist.ReduceOp.AVG:
                return original(output, *args, **named)
            original(output, *args, **named | {"op": dist.ReduceOp.SUM, "async_op": False})
            output /= dist.get_world_size(named.get("group"))
            return None

        return reduced

    for name in ("all_reduce", "reduce_scatter_tensor"):
        setattr(dist, name, averaging(getattr(dist, name)))
