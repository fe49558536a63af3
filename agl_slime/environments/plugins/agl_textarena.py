from agl_slime.environments.tasksets.textarena import ChatHarness, TwoPlayerEnv, TwoPlayerTaskset

__all__ = ["ChatHarness", "TwoPlayerEnv", "TwoPlayerTaskset"]
