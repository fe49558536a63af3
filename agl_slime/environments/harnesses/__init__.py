"""Command-line agents that verifiers has no harness for, as harnesses of its kind."""
