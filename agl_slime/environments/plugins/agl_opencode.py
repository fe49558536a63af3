from agl_slime.environments.harnesses.opencode import OpenCodeHarness

__all__ = ["OpenCodeHarness"]
