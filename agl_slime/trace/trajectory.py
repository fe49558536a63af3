"""One rollout as its agent, its reward function and the transcripts see it: the task and the turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agl_slime.trace.turn import Messages, Turn


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """What happened in one attempt of a rollout.

    ``task`` is the rollout's input. ``reward`` and ``rewards`` (by name) are ``None`` and empty until there is a
    reward. ``stop_reason`` says why the rollout stopped; where the agent named none it is the finish reason of the last
    call. ``metadata`` is the rollout's, and ``metadata["gateway"]`` what a gateway counted of its requests:
    ``refused/400`` is how many were refused. ``mode`` is ``"train"``, ``"val"``, ``"test"`` or not set.
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

    @property
    def response(self) -> str:
        """The text of the last answer, with the part of it that was there before the last call went on with it; empty
        when there is none."""
        if not self.turns:
            return ""
        asked = self.turns[-1].messages
        begun = str(asked[-1].get("content") or "") if asked and asked[-1].get("role") == "assistant" else ""
        return begun + self.turns[-1].text

    @property
    def messages(self) -> Messages:
        """The last call's messages with its answer, where calls recorded theirs; else the answers alone."""
        if not self.turns:
            return ()
        asked = self.turns[-1].messages
        if asked is None:
            return tuple({"role": "assistant", "content": turn.text} for turn in self.turns)
        if asked and asked[-1].get("role") == "assistant":
            return (*asked[:-1], {**asked[-1], "content": self.response})
        return (*asked, {"role": "assistant", "content": self.response})

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
"""Stop reasons after which more would have come."""


def is_truncated(stop_reason: str) -> bool:
    """Whether a rollout (or a call) that stopped for ``stop_reason`` was cut off."""
    return stop_reason in TRUNCATING_REASONS
