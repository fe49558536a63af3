"""Why a rollout stopped."""

from __future__ import annotations

from enum import Enum


class StopReason(str, Enum):
    """The value is what stands in ``Sample.metadata["stop_reason"]``."""

    STOP = "stop"
    """The model ended its answer and nothing asked for more."""
    LENGTH = "length"
    """The last answer, or the whole trajectory, reached its limit of tokens."""
    MAX_TURNS = "max_turns"
    """More turns were wanted than are allowed."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The conversation did not fit into the model's context any more. Not retried: it would not fit the second time
    either."""
    TOOL_ERROR = "tool_error"
    """A tool failed and the agent is set to stop then; by default the model sees the error and goes on."""
    ABORTED = "aborted"
    """The engine broke the last answer off, and taking it up again did not help."""


class RolloutStopped(Exception):
    """Raised by ``RolloutSession.ask`` when the rollout is over: a limit was reached before the model could answer.

    Not an error: ``SGLangLitAgent`` catches it and scores what there is. An agent that wants to do something else then
    catches it in ``run``.
    """

    def __init__(self, reason: StopReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def of_finish_reason(finish_reason: str) -> StopReason:
    """The stop reason of a rollout whose last answer ended with the engine's ``finish_reason``."""
    return {"length": StopReason.LENGTH, "abort": StopReason.ABORTED}.get(finish_reason, StopReason.STOP)
