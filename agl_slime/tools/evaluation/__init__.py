"""Comparison of models on the same tasks: samples, mean rewards, pass@k and intervals."""
