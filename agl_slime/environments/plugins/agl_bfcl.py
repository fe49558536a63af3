from agl_slime.environments.tasksets.bfcl import BfclEnv, BfclTaskset, ChatHarness

__all__ = ["BfclEnv", "BfclTaskset", "ChatHarness"]
