from agl_slime.environments.tasksets.chat import ChatHarness, LocalEnv
from agl_slime.environments.tasksets.reasoning_gym import ReasoningGymTaskset

__all__ = ["ChatHarness", "LocalEnv", "ReasoningGymTaskset"]
