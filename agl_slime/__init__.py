"""agl-slime trains Agent Lightning agents with slime: rollouts become Samples with the ids and log-probs that SGLang
sampled; updated weights go back to SGLang.

Names are imported at their first use, so ``import agl_slime`` is instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "AGLDataSource": "agl_slime.train.slime.source",
    "APIMultiTurnRollout": "agl_slime.buffer.batched.api_multi_turn",
    "Answer": "agl_slime.agent.session",
    "BridgeStore": "agl_slime.store.bridge",
    "ConcurrentRunner": "agl_slime.runner.concurrent",
    "DiskWeightSync": "agl_slime.engine.client.weights",
    "Generation": "agl_slime.engine.client.generation",
    "LoopSettings": "agl_slime.loop.settings",
    "MultiTurnRollout": "agl_slime.buffer.batched.multi_turn",
    "MultiTurnScheduler": "agl_slime.agent.scheduler",
    "OnlineRLLoop": "agl_slime.loop.online",
    "RolloutSession": "agl_slime.agent.session",
    "RunnerThread": "agl_slime.runner.concurrent",
    "SGLangClient": "agl_slime.engine.client.client",
    "SGLangLitAgent": "agl_slime.agent.agent",
    "Sample": "agl_slime.types",
    "SamplingParams": "agl_slime.engine.client.generation",
    "SlimeAlgorithm": "agl_slime.cli.algorithm",
    "ToolManager": "agl_slime.agent.tools",
    "Trajectory": "agl_slime.tokens.turn",
    "load_environment": "agl_slime.environments.environment",
    "register_scheduler": "agl_slime.agent.scheduler",
    "rollout_to_sample": "agl_slime.tokens.converter",
    "rollout_to_samples": "agl_slime.tokens.converter",
}

if TYPE_CHECKING:
    from agl_slime.agent.agent import SGLangLitAgent as SGLangLitAgent
    from agl_slime.agent.scheduler import MultiTurnScheduler as MultiTurnScheduler
    from agl_slime.agent.scheduler import register_scheduler as register_scheduler
    from agl_slime.agent.session import Answer as Answer
    from agl_slime.agent.session import RolloutSession as RolloutSession
    from agl_slime.agent.tools import ToolManager as ToolManager
    from agl_slime.buffer.batched.api_multi_turn import APIMultiTurnRollout as APIMultiTurnRollout
    from agl_slime.buffer.batched.multi_turn import MultiTurnRollout as MultiTurnRollout
    from agl_slime.cli.algorithm import SlimeAlgorithm as SlimeAlgorithm
    from agl_slime.engine.client.client import SGLangClient as SGLangClient
    from agl_slime.engine.client.generation import Generation as Generation
    from agl_slime.engine.client.generation import SamplingParams as SamplingParams
    from agl_slime.engine.client.weights import DiskWeightSync as DiskWeightSync
    from agl_slime.environments.environment import load_environment as load_environment
    from agl_slime.loop.online import OnlineRLLoop as OnlineRLLoop
    from agl_slime.loop.settings import LoopSettings as LoopSettings
    from agl_slime.runner.concurrent import ConcurrentRunner as ConcurrentRunner
    from agl_slime.runner.concurrent import RunnerThread as RunnerThread
    from agl_slime.store.bridge import BridgeStore as BridgeStore
    from agl_slime.tokens.converter import rollout_to_sample as rollout_to_sample
    from agl_slime.tokens.converter import rollout_to_samples as rollout_to_samples
    from agl_slime.tokens.turn import Trajectory as Trajectory
    from agl_slime.train.slime.source import AGLDataSource as AGLDataSource
    from agl_slime.types import Sample as Sample


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'agl_slime' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])


__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]
