"""Harnesses for command-line agents that verifiers has none for."""
