from agl_slime.environments.tasksets.bfcl import BfclEnv, BfclTaskset
from agl_slime.environments.tasksets.chat import ChatHarness

__all__ = ["BfclEnv", "BfclTaskset", "ChatHarness"]
