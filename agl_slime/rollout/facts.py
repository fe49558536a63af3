"""What a rollout reports about itself beside its turns and its reward; written as attributes of its last span."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from agl_slime.rollout.stop import StopReason
from agl_slime.trace import attributes as names


@dataclass
class RolloutFacts:
    """Counts of one rollout, all its branches together.

    ``tool_calls`` counts executed calls by tool, ``malformed_calls`` what looked like a call and was none,
    ``unknown_tools`` calls of tools that do not exist, ``tool_errors`` and ``tool_timeouts`` those that failed.
    ``untrained_turns`` are the turns that the loss scale leaves out.
    """

    stop_reason: StopReason | None = None
    tools: tuple[str, ...] = ()
    tool_calls: Counter[str] = field(default_factory=Counter)
    malformed_calls: int = 0
    unknown_tools: int = 0
    tool_errors: int = 0
    tool_timeouts: int = 0
    open_seams: int = 0
    untrained_turns: tuple[int, ...] = ()

    def attributes(self) -> dict[str, Any]:
        """As span attributes: strings only, and none for what did not happen."""
        attributes: dict[str, Any] = {}
        if self.stop_reason is not None:
            attributes[names.STOP_REASON] = self.stop_reason.value
        if self.tools:
            tools = {
                "offered": list(self.tools),
                "calls": dict(self.tool_calls),
                "malformed": self.malformed_calls,
                "unknown": self.unknown_tools,
                "errors": self.tool_errors,
                "timeouts": self.tool_timeouts,
            }
            attributes[names.TOOLS] = json.dumps(tools)
        if self.open_seams:
            attributes[names.OPEN_SEAMS] = self.open_seams
        if self.untrained_turns:
            attributes[names.UNTRAINED_TURNS] = json.dumps(list(self.untrained_turns))
        return attributes
