"""Runtimes for verifiers' agents."""
