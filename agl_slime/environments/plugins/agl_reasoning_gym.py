from agl_slime.environments.tasksets.reasoning_gym import ChatHarness, LocalEnv, ReasoningGymTaskset

__all__ = ["ChatHarness", "LocalEnv", "ReasoningGymTaskset"]
