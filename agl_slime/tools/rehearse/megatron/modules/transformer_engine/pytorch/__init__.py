from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.attention import DotProductAttention
from transformer_engine.pytorch.layers import GroupedLinear, LayerNorm, LayerNormLinear, Linear, RMSNorm

__all__ = ["DotProductAttention", "GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear", "RMSNorm", "distributed"]
