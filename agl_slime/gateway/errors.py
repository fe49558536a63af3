"""Errors with the status and text on which clients retry, shorten the prompt or give up."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from agl_slime.errors import (
    AglSlimeError,
    ContextOverflowError,
    DiskFullError,
    EngineRequestError,
    EngineServerError,
    EngineTimeoutError,
    EngineUnreachableError,
    GatewayRequestError,
    PromptError,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
THREADS_UNSUPPORTED = "thread_unsupported_request"  # Anthropic's tool runners then send whole conversations

_MOST_EXPLAINED = 64


def refusal_of(error: BaseException, *, most_mb: float = 0) -> GatewayRequestError:
    """The answer to a request that failed with ``error``; ``most_mb`` is the limit of a body."""
    if isinstance(error, GatewayRequestError):
        return error
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return GatewayRequestError(f"the body is larger than {most_mb:g} MB", status=413, code="request_too_large")
    if isinstance(error, (BadHttpMessage, web.RequestPayloadError)):
        return GatewayRequestError(f"the body cannot be read: {error}", code="invalid_body")
    if isinstance(error, RecursionError):
        return GatewayRequestError("the request is nested too deeply", code="invalid_value")
    if isinstance(error, ContextOverflowError):
        message = f"This model's maximum context length is exceeded: {error}"
        return GatewayRequestError(message, code="context_length_exceeded", param="messages")
    if isinstance(error, (EngineRequestError, PromptError)):
        return GatewayRequestError(str(error), code="invalid_request")
    if isinstance(error, EngineServerError):  # overloaded, after retries
        return GatewayRequestError(str(error), status=429, code="engine_overloaded")
    if isinstance(error, EngineTimeoutError):
        return GatewayRequestError(str(error), status=504, code="engine_timeout")
    if isinstance(error, EngineUnreachableError):
        return GatewayRequestError(str(error), status=503, code="engine_unreachable")
    if isinstance(error, DiskFullError):
        return GatewayRequestError(str(error), status=503, code="disk_full")
    if isinstance(error, asyncio.CancelledError):
        return GatewayRequestError("the rollout ended during the request", status=410, code="rollout_ended")
    message = str(error) if isinstance(error, AglSlimeError) else f"{type(error).__name__}: {error}"
    return GatewayRequestError(f"the gateway failed: {message}", status=500, code="gateway_error")


def is_gone(error: BaseException, *, unless: asyncio.Task[Any] | None = None) -> bool:
    """Whether ``error`` means that the client has disconnected, unless the task ``unless`` was cancelled."""
    if isinstance(error, asyncio.CancelledError):
        return unless is None or not unless.cancelled()
    return isinstance(error, ConnectionError) and not isinstance(error, AglSlimeError)  # engine errors are both


def explain_once(refusal: GatewayRequestError, rollout_id: str, *, _logged: set[str] = set()) -> None:  # noqa: B006
    """Log the first bad request of each kind in this process: some clients swallow error messages."""
    kind = f"{refusal.status} {refusal.code} {(refusal.param or '').partition('[')[0]}"
    if refusal.status in (400, 413) and kind not in _logged and len(_logged) < _MOST_EXPLAINED:
        _logged.add(kind)
        text = "Rollout %s: a request was refused with %d: %s. Further requests like it are counted, not logged."
        logger.warning(text, rollout_id, refusal.status, str(refusal)[:500])
