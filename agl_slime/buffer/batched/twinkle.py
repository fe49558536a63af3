"""twinkle's import paths: after ``import agl_slime.buffer.batched.twinkle`` they lead to this package's classes. Raises
``ConfigError`` where twinkle is installed, whose own classes stay in place."""

import sys
from importlib.util import find_spec

from agl_slime.agent import tools
from agl_slime.buffer.batched import api_multi_turn, multi_turn
from agl_slime.engine.client import generation
from agl_slime.errors import ConfigError

if find_spec("twinkle") or find_spec("twinkle_agentic"):
    raise ConfigError("twinkle is installed, and its import paths are its own: import from agl_slime.buffer.batched")
sys.modules |= {
    "twinkle.data_format": multi_turn,
    "twinkle.data_format.sampling": generation,
    "twinkle_agentic.protocol.openai": api_multi_turn,
    "twinkle_agentic.rollout.api_multi_turn": api_multi_turn,
    "twinkle_agentic.rollout.multi_turn": multi_turn,
    "twinkle_agentic.tools.tool_manager": tools,
}
