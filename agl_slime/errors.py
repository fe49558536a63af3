"""One exception tree.

Every error that this package raises on purpose is an ``AglSlimeError`` whose text is one sentence: the field, the value
and the fix. Each class also derives from the standard exception that fits, so ``except ValueError`` works.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

LIBRARY_PATHS = (sysconfig.get_paths()["stdlib"], str(Path(__file__).parent), "<")


class AglSlimeError(Exception):
    """Root of all errors raised by this package."""


class ConfigError(AglSlimeError, ValueError):
    """A setting, flag or file that cannot be used; the text names the field, the value and the fix."""


class SettingError(ConfigError):
    """The value of the setting ``name`` is refused: ``problem`` is the rest of the sentence."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name} {problem}")
        self.name, self.problem = name, problem

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.name, self.problem)


class MissingDependencyError(AglSlimeError, ImportError):
    """An optional package is needed and not installed; the text names the package."""


@contextmanager
def missing_as_error(text: str) -> Iterator[None]:
    """Turn the error of an import in the block into a ``MissingDependencyError`` of this text."""
    try:
        yield
    except ImportError as error:
        raise MissingDependencyError(text) from error


class UnknownVersionError(MissingDependencyError):
    """An optional package is installed in an unknown version; the text names the version and the missing name."""


class DiskFullError(AglSlimeError, OSError):
    """A file could not be written because the disk is full; the text names the directory."""


class FileLockedError(AglSlimeError):
    """Another program keeps a file of the run locked; the text names the file."""


class EngineError(AglSlimeError):
    """A request to SGLang (or the embedded engine) failed. ``status`` is the HTTP status, if there was an answer;
    ``transient`` errors are retried, not before ``retry_after_s``."""

    status: int | None = None
    transient = False
    retry_after_s = 0.0


class EngineUnreachableError(EngineError, ConnectionError):
    """No connection, or the connection broke, and the retries failed."""

    transient = True


class EngineTimeoutError(EngineError, TimeoutError):
    """The engine did not answer within the total or the idle timeout."""

    transient = True


class EngineServerError(EngineError):
    """The engine kept answering 429 or 5xx until the retries were used up."""

    transient = True


class EngineProtocolError(EngineError):
    """The answer is not SGLang's: not JSON, not the documented shape, or another server's page."""

    transient = True


class EngineRequestError(EngineError, ValueError):
    """The engine refused the request (4xx); a retry would be refused, too."""


class BufferRequestError(AglSlimeError, ValueError):
    """The rollout buffer refuses a request with this HTTP status (503: retry later)."""

    def __init__(self, message: str, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class GatewayRequestError(AglSlimeError, ValueError):
    """The gateway refuses a request with this HTTP status, which decides whether its client retries, an error code, and
    the name of the wrong field."""

    def __init__(
        self, message: str, *, status: int = 400, code: str = "invalid_value", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class ContextOverflowError(EngineRequestError):
    """The prompt leaves no room for a token within the model's context length."""


class OutOfVocabularyError(EngineRequestError):
    """The prompt has a token id outside of the model's vocabulary, which would kill some servers."""


class WeightSyncError(EngineError):
    """New weights did not reach every worker, or a worker reports another version afterwards."""


class RolloutError(AglSlimeError):
    """A rollout failed; ``reason`` is a short stable word for counting."""

    reason: str = "error"

    def __init__(self, message: str, *, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or self.reason


class RewardError(RolloutError, ValueError):
    """The reward is missing, not a number, NaN or infinite; no default replaces it."""

    reason = "bad_reward"


class TraceError(RolloutError, ValueError):
    """The spans of a rollout cannot be turned into samples (no model call, misaligned ids, broken encoding)."""

    reason = "bad_trace"


class PromptError(TraceError):
    """The chat template refuses the messages; the text is the template's error."""

    reason = "bad_prompt"


class RolloutTimeoutError(RolloutError, TimeoutError):
    """An agent ran past its time limit and was cancelled."""

    reason = "timeout"


class LoopError(AglSlimeError, RuntimeError):
    """The run cannot continue; the text says why."""


class DataSourceError(AglSlimeError, RuntimeError):
    """The data source stopped, timed out, or does not have the requested groups."""


class TrainerError(AglSlimeError, RuntimeError):
    """A training step failed, or its batch cannot be trained on."""


def format_exception(error: BaseException) -> str:
    """An exception as one line, with its place in the user's code: ``KeyError: 'label' (my_agent.py, line 12)``."""
    message = " ".join(str(error).split())
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    # a SyntaxError's text names file and line
    place = "" if isinstance(error, SyntaxError) else format_place(frames)
    return type(error).__name__ + (f": {message}" if message else "") + (f" ({place})" if place else "")


def format_place(frames: Sequence[tuple[str, int]]) -> str:
    """File and line of the innermost frame of a user's code, else of the innermost frame; empty without frames."""
    users = [frame for frame in frames if not frame[0].startswith(LIBRARY_PATHS) and "site-packages" not in frame[0]]
    return "".join(f"{Path(file).name}, line {line}" for file, line in (users or frames)[-1:])
