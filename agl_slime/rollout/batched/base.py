"""What rollouts over lists of trajectories share: the base class, tools per trajectory, Ray."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.rollout.tools import ToolManager

Trajectory = dict[str, Any]
"""``messages`` and any other columns in; the same with what the rollout adds out."""


class Rollout(ABC):
    """Trajectories in, the same number of trajectories out, in their order, with ``messages``, ``turns``,
    ``stop_reason`` and ``truncated``."""

    @abstractmethod
    def __call__(self, trajectories: list[Trajectory], **kwargs: Any) -> list[Trajectory]:
        """Run ``trajectories`` to their ends."""
        ...

    @classmethod
    def remote(cls, *args: Any, **kwargs: Any) -> Any:
        """The rollout as a Ray actor: ``actor = MultiTurnRollout.remote(...)``, then
        ``ray.get(actor.__call__.remote(trajectories))``."""
        try:
            import ray
        except ImportError as error:
            raise MissingDependencyError(f"{cls.__name__}.remote needs Ray: pip install ray") from error
        return ray.remote(cls).remote(*args, **kwargs)


def managers_for(tools: Any, trajectories: Sequence[Trajectory]) -> list[Any]:
    """One tool manager per trajectory, from one for all, a list of them, a function of the trajectory, or ``None``."""
    if tools is None:
        return [None] * len(trajectories)
    if isinstance(tools, (list, tuple)):
        if len(tools) != len(trajectories):
            raise ConfigError(
                f"a list of tool managers needs one for each trajectory, got {len(tools)} for {len(trajectories)}"
            )
        return list(tools)
    if not isinstance(tools, ToolManager) and not hasattr(tools, "run") and callable(tools):
        return [tools(trajectory) for trajectory in trajectories]
    return [tools] * len(trajectories)
