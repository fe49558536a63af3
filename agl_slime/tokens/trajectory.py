"""A rollout for its agent, its reward function and the report: the task and the turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agl_slime.tokens.turn import Messages, Turn


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The course of one attempt of a rollout.

    ``task`` is the rollout's input. ``reward`` and ``rewards`` (by name) are ``None`` and empty until there is a
    reward. ``stop_reason`` is the agent's, or else the finish reason of the last call. ``metadata`` is the rollout's,
    and ``metadata["gateway"]`` has the counts of the gateway, such as ``refused/400``, the number of refused requests.
    ``metadata["tools"]`` has the counts of tools. ``tools``, in an agent's ``score``, are the rollout's tools by name.
    ``mode`` is ``"train"``, ``"val"``, ``"test"`` or not set.
    """

    rollout_id: str
    attempt_id: str
    task: Any
    mode: str | None = "train"
    turns: tuple[Turn, ...] = ()
    reward: float | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    stop_reason: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tools: Mapping[str, Any] = field(default_factory=dict)

    @property
    def response(self) -> str:
        """The text of the last answer, including the part that the last call continued; empty without an answer."""
        if not self.turns:
            return ""
        messages = self.turns[-1].messages
        start = str(messages[-1].get("content") or "") if messages and messages[-1].get("role") == "assistant" else ""
        return start + self.turns[-1].text

    @property
    def messages(self) -> Messages:
        """The last call's messages with its answer, if recorded; else the answers alone."""
        if not self.turns:
            return ()
        messages = self.turns[-1].messages
        if messages is None:
            return tuple({"role": "assistant", "content": turn.text} for turn in self.turns)
        if messages and messages[-1].get("role") == "assistant":
            return (*messages[:-1], {**messages[-1], "content": self.response})
        return (*messages, {"role": "assistant", "content": self.response})

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the engine sampled in all turns."""
        return sum(len(turn.response_ids) for turn in self.turns)

    @property
    def truncated(self) -> bool:
        """Whether the rollout was cut off and did not end by itself."""
        return is_truncated(self.stop_reason) or (bool(self.turns) and is_truncated(self.turns[-1].finish_reason))


TRUNCATING_REASONS = frozenset(
    {"length", "abort", "aborted", "max_turns", "max_tokens", "max_trajectory_tokens", "context_overflow"}
)
"""Stop reasons of a rollout or call that was cut off."""


def is_truncated(stop_reason: str) -> bool:
    """Whether a rollout (or a call) that stopped for ``stop_reason`` was cut off."""
    return stop_reason in TRUNCATING_REASONS
