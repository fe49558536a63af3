"""The embedded engine: SGLang's HTTP protocol for a small model on the CPU, for the first minutes and for tests.

``EmbeddedEngine`` serves a checkpoint in its own process. Importing this package needs neither torch nor transformers.
"""

from agl_slime.engine.process import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
