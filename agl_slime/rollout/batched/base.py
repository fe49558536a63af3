"""What rollouts over lists of trajectories share: the call, tools per trajectory, trace files, Ray."""

from __future__ import annotations

import json
import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agl_slime.errors import ConfigError, MissingDependencyError
from agl_slime.rollout.session import Session
from agl_slime.rollout.tool_parsers import ToolParser
from agl_slime.sglang.generation import SamplingParams

logger = logging.getLogger(__name__)

Trajectory = dict[str, Any]
"""``messages`` and any other columns in; the same with what the rollout adds out."""
Predicate = Callable[[Mapping[str, Any]], bool]

# Ids are for training, not for reading, and a file of them is many times as large.
_NOT_IN_TRACES = frozenset({"input_ids", "labels", "logprobs", "turn_records", "segments"})


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


class ToolRollout(Rollout):
    """A rollout with tools, limits and trace files.

    Args:
        tool_manager: A ``ToolManager`` for all trajectories, a list with one for each, or a function that makes one for
            a trajectory, which is closed when that has ended. May be given per call, as ``sampling_params``.
        max_turns: Most answers of a trajectory.
        tool_parser: How the model writes calls; by default as its chat template shows.
        trace_dir: Gets a JSON file per trajectory, ``{step}-{ok|fail}-{id}.json``; ``trace_callback`` decides which,
            ``success_callback`` what ``ok`` is (by default: it ended by itself).
    """

    def __init__(
        self,
        *,
        tool_manager: Any = None,
        sampling_params: SamplingParams | None = None,
        max_turns: int = 6,
        tool_parser: str | ToolParser | None = None,
        trace_dir: str | Path | None = None,
        trace_callback: Predicate | None = None,
        success_callback: Predicate | None = None,
    ) -> None:
        if max_turns < 1:
            raise ConfigError(f"max_turns must be at least 1, got {max_turns}")
        self._tools = tool_manager
        self._sampling = sampling_params
        self._max_turns = max_turns
        self._tool_parser = tool_parser
        self._traces = trace_dir, trace_callback, success_callback
        self._calls = 0

    def __call__(
        self,
        trajectories: list[Trajectory],
        *,
        tool_manager: Any = None,
        sampling_params: SamplingParams | None = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> list[Trajectory]:
        """Run ``trajectories`` to their ends. ``step`` (in trace files' names) is by default the call's number."""
        step = self._calls if step is None else step
        self._calls += 1
        tools: Any = tool_manager if tool_manager is not None else self._tools
        made = callable(tools) and not hasattr(tools, "run")
        if made:
            tools = [tools(trajectory) for trajectory in trajectories]
        elif not isinstance(tools, (list, tuple)):
            tools = [tools] * len(trajectories)
        if len(tools) != len(trajectories):
            raise ConfigError(f"tool_manager needs one for each trajectory, got {len(tools)} for {len(trajectories)}")
        finished = self._run(trajectories, tools, made, sampling_params or self._sampling) if trajectories else []
        for number, trajectory in enumerate(finished):
            self._write_trace(trajectory, step, str(trajectory.get("id", number)))
        return finished

    @abstractmethod
    def _run(
        self, trajectories: list[Trajectory], tools: Sequence[Any], made: bool, sampling: SamplingParams | None
    ) -> list[Trajectory]:
        """Run ``trajectories``, each with its ``tools``; those that were ``made`` for it are closed at its end."""

    def _output(self, trajectory: Trajectory, session: Session, **fields: Any) -> Trajectory:
        played = {
            "messages": session.messages,
            "turns": len(session.turns),
            "tools_called": session.stats.tool_counts(),
        }
        return {**trajectory, **played, **fields}

    def _write_trace(self, trajectory: Trajectory, step: int, name: str) -> None:
        directory, is_traced, is_success = self._traces
        try:
            if directory is None or (is_traced is not None and not is_traced(trajectory)):
                return
            ended = trajectory["stop_reason"] == "stop" and not trajectory["truncated"]
            outcome = "ok" if (ended if is_success is None else is_success(trajectory)) else "fail"
            readable = {key: value for key, value in trajectory.items() if key not in _NOT_IN_TRACES}
            Path(directory).mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^\w.-]", "_", name)[:100]
            file = Path(directory) / f"{step}-{outcome}-{name}.json"
            file.write_text(json.dumps(readable, ensure_ascii=False, indent=1, default=str) + "\n", encoding="utf-8")
        except Exception:  # a callback of somebody else's, a full disk: neither is worth a rollout
            logger.exception("The trace of a trajectory could not be written to %s.", directory)
