"""slime's arguments for a CPU: options that kernels alone serve are off."""

from __future__ import annotations

import os
from typing import Any

PRECISION = "AGL_SLIME_CPU_PRECISION"
"""``bf16``: slime's default; else ``float32``, in which log-probs can be compared."""
_KERNELS = """masked_softmax_fusion gradient_accumulation_fusion apply_rope_fusion persist_layer_norm
    moe_permute_fusion moe_router_fusion moe_router_padding_for_fp8 cross_entropy_loss_fusion"""


def patch() -> None:
    """Extend slime's defaults of Megatron's options, in the process that parses the command line."""
    from slime.backends.megatron_utils import arguments

    defaults = arguments._set_default_megatron_args

    def on_cpu(args: Any) -> Any:
        args = defaults(args)
        args.bf16 = args.bf16 and os.environ.get(PRECISION) == "bf16"
        for name in _KERNELS.split():
            if hasattr(args, name):
                setattr(args, name, False)
        return args

    arguments._set_default_megatron_args = on_cpu
