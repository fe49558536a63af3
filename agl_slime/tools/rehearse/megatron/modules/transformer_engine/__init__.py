"""Transformer Engine's layers in plain torch, for Megatron-LM's own wrappers: no fp8, no fused kernels."""

from transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
__version__ = "1.12.0"  # Megatron asks later versions for modules that it uses on GPUs alone
