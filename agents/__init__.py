"""Agents that are ready to train, each one short file."""
