"""Why a rollout stopped, and what it reports about itself beside its turns and its reward."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from agl_slime.rollout.tools import ToolResult
from agl_slime.trace import attributes as names


class StopReason(str, Enum):
    """The value is what stands in ``Sample.metadata["stop_reason"]``."""

    STOP = "stop"  # the model ended its answer and nothing asked for more
    LENGTH = "length"  # the last answer, or the whole trajectory, reached its limit of tokens
    MAX_TURNS = "max_turns"  # more turns were wanted than are allowed
    CONTEXT_OVERFLOW = "context_overflow"  # the conversation did not fit into the model's context; never retried
    TOOL_ERROR = "tool_error"  # a tool failed, and the agent is set to stop then
    ABORTED = "aborted"  # the engine broke the last answer off, and taking it up again did not help


class RolloutStopped(Exception):
    """Raised by ``RolloutSession.ask`` when a limit was reached before the model could answer. Not an error:
    ``SGLangLitAgent`` catches it and scores what there is, unless the agent catches it in ``run``."""

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class RolloutStats:
    """Counts of one rollout, all its branches together. ``tool_calls`` counts executed calls by tool, ``calls`` those
    that were ``malformed``, of ``unknown`` tools, ``errors`` and among them ``timeouts``; ``untrained_turns`` are the
    turns that the loss scale leaves out, ``infos`` what the scheduler wants to be known."""

    stop_reason: StopReason | None = None
    tools: tuple[str, ...] = ()
    tool_calls: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    open_boundaries: int = 0
    untrained_turns: tuple[int, ...] = ()
    infos: dict[str, Any] = field(default_factory=dict)

    def count(self, results: Iterable[ToolResult]) -> None:
        for result in results:
            unknown = result.error == "unknown_tool"
            self.tool_calls[result.call.name] += not unknown
            self.calls.update(unknown=unknown, errors=bool(result.error) - unknown, timeouts=result.error == "timeout")

    def tool_counts(self) -> dict[str, Any]:
        """As ``Sample.metadata["tools"]`` has them."""
        counts = {name: self.calls[name] for name in ("malformed", "unknown", "errors", "timeouts")}
        return {"offered": list(self.tools), "calls": dict(+self.tool_calls), **counts}

    def attributes(self) -> dict[str, Any]:
        """As span attributes: none for what did not happen."""
        attributes = {
            names.STOP_REASON: self.stop_reason.value if self.stop_reason is not None else None,
            names.TOOLS: json.dumps(self.tool_counts()) if self.tools else None,
            names.OPEN_BOUNDARIES: self.open_boundaries,
            names.UNTRAINED_TURNS: json.dumps(self.untrained_turns) if self.untrained_turns else None,
        }
        return {name: value for name, value in attributes.items() if value}
