"""One exception tree.

Every error that this package raises on purpose is an ``AglSlimeError`` whose text is one sentence: what was wrong, the
value, and what to do. Each class also derives from the standard type that fits, so ``except ValueError`` and the like
work as people expect.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

_NOT_THE_USERS = (sysconfig.get_paths()["stdlib"], str(Path(__file__).parent), "<")


class AglSlimeError(Exception):
    """Root of all errors raised by this package."""


class ConfigError(AglSlimeError, ValueError):
    """A setting, flag or file that cannot be used; the text names the field, the value and the fix."""


class MissingDependencyError(AglSlimeError, ImportError):
    """An optional system was asked for and is not installed; the text says what to install."""


class UnknownVersionError(MissingDependencyError):
    """An optional system is installed in a version that this package does not know; the text names the version and
    what is missing from it."""


class DiskFullError(AglSlimeError, OSError):
    """What had to be written found no space; the text names the directory."""


class EngineError(AglSlimeError):
    """SGLang (or the embedded engine) did not do what was asked. ``status`` is its answer's, where there was one; what
    ``transient`` is sent again, not before ``retry_after_s``."""

    status: int | None = None
    transient = False
    retry_after_s = 0.0


class EngineUnreachableError(EngineError, ConnectionError):
    """No connection, or the connection broke, and retries did not help."""

    transient = True


class EngineTimeoutError(EngineError, TimeoutError):
    """The engine did not answer within the total or the idle timeout."""

    transient = True


class EngineServerError(EngineError):
    """The engine kept answering 429 or 5xx until the retries were used up."""

    transient = True


class EngineProtocolError(EngineError):
    """The answer is not SGLang's: not JSON, not the documented shape, or a page of some other server."""

    transient = True


class EngineRequestError(EngineError, ValueError):
    """The engine refused the request (4xx). Asking again with the same request gives the same answer."""


class BufferRequestError(AglSlimeError, ValueError):
    """A request that the rollout buffer refuses, with the HTTP status that says so (503: later)."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class GatewayRequestError(AglSlimeError, ValueError):
    """A request that the gateway refuses, with the HTTP status that makes its client do the right thing, a word for
    programs, and the field that is wrong."""

    def __init__(
        self, message: str, *, status: int = 400, code: str = "invalid_value", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class ContextOverflowError(EngineRequestError):
    """The prompt leaves no room for a token within the model's context length."""


class OutOfVocabularyError(EngineRequestError):
    """The prompt holds a token id that the model does not have; sent on, it would kill some servers."""


class WeightSyncError(EngineError):
    """New weights did not reach every worker, or a worker reports another version afterwards."""


class RolloutError(AglSlimeError):
    """A rollout cannot be used; ``reason`` is a short stable word for counting."""

    reason: str = "error"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or self.reason


class RewardError(RolloutError, ValueError):
    """The reward is missing, not a number, NaN or infinite. It is never replaced by an invented one."""

    reason = "bad_reward"


class TraceError(RolloutError, ValueError):
    """The spans of a rollout cannot be turned into samples (no model call, misaligned ids, broken encoding)."""

    reason = "bad_trace"


class PromptError(TraceError):
    """The chat template refuses the messages; the text is what the template says."""

    reason = "bad_prompt"


class RolloutTimeoutError(RolloutError, TimeoutError):
    """An agent ran past its time limit and was cancelled."""

    reason = "timeout"


class LoopError(AglSlimeError, RuntimeError):
    """The run cannot go on; the text says why."""


class DataSourceError(AglSlimeError, RuntimeError):
    """The data source stopped, timed out, or was asked for something it does not hold."""


class TrainerError(AglSlimeError, RuntimeError):
    """A training step failed or was given a batch it cannot train on."""


def format_exception(error: BaseException) -> str:
    """Any exception in one line, with the place it comes from: ``KeyError: 'label' (my_agent.py, line 12)``."""
    message = " ".join(str(error).split())
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    # a SyntaxError names its file and line itself
    place = "" if isinstance(error, SyntaxError) else format_place(frames)
    return type(error).__name__ + (f": {message}" if message else "") + (f" ({place})" if place else "")


def format_place(frames: Sequence[tuple[str, int]]) -> str:
    """File and line of the innermost frame that is neither a library's nor this package's, else of the innermost one;
    empty without frames."""
    own = [frame for frame in frames if not frame[0].startswith(_NOT_THE_USERS) and "site-packages" not in frame[0]]
    return "".join(f"{Path(file).name}, line {line}" for file, line in (own or frames)[-1:])
