"""flash-linear-attention's names that slime's Qwen3-Next and Qwen3.5 take, in plain torch."""
