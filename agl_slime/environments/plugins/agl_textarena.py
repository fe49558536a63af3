from agl_slime.environments.tasksets.chat import ChatHarness
from agl_slime.environments.tasksets.textarena import TwoPlayerEnv, TwoPlayerTaskset

__all__ = ["ChatHarness", "TwoPlayerEnv", "TwoPlayerTaskset"]
