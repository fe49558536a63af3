"""Errors in the words and with the status that make each client do the right thing."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from agl_slime.errors import (
    AglSlimeError,
    ContextOverflowError,
    EngineRequestError,
    EngineServerError,
    EngineTimeoutError,
    EngineUnreachableError,
    GatewayRequestError,
    PromptError,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
THREADS_UNSUPPORTED = "thread_unsupported_request"  # Anthropic's word, on which its tool runners do without
_ANTHROPICS_CODES = (THREADS_UNSUPPORTED, "tool_reference_unresolved")

_MOST_EXPLAINED = 64
_OPENAI_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_ANTHROPIC_TYPES |= {413: "request_too_large", 429: "rate_limit_error", 529: "overloaded_error"}


def refusal_of(error: BaseException, *, most_mb: float = 0) -> GatewayRequestError:
    """What to answer when something went wrong, whatever it is. ``most_mb``: of a body."""
    if isinstance(error, GatewayRequestError):
        return error
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return GatewayRequestError(f"the body is larger than {most_mb:g} MB", status=413, code="request_too_large")
    if isinstance(error, (BadHttpMessage, web.RequestPayloadError)):
        return GatewayRequestError(f"the body cannot be read: {error}", code="invalid_body")
    if isinstance(error, RecursionError):
        return GatewayRequestError("the request is nested too deeply", code="invalid_value")
    if isinstance(error, ContextOverflowError):
        return GatewayRequestError(
            f"This model's maximum context length is exceeded: {error}",
            code="context_length_exceeded",
            param="messages",
        )
    if isinstance(error, (EngineRequestError, PromptError)):
        return GatewayRequestError(str(error), code="invalid_request")
    if isinstance(error, EngineServerError):  # the engine has too much to do; its client has tried for long
        return GatewayRequestError(str(error), status=429, code="engine_overloaded")
    if isinstance(error, EngineTimeoutError):
        return GatewayRequestError(str(error), status=504, code="engine_timeout")
    if isinstance(error, EngineUnreachableError):
        return GatewayRequestError(str(error), status=503, code="engine_unreachable")
    if isinstance(error, asyncio.CancelledError):
        return GatewayRequestError("the rollout has ended while this was answered", status=410, code="rollout_ended")
    told = str(error) if isinstance(error, AglSlimeError) else f"{type(error).__name__}: {error}"
    return GatewayRequestError(f"the gateway failed: {told}", status=500, code="gateway_error")


def is_gone(error: BaseException, *, unless: asyncio.Task[Any] | None = None) -> bool:
    """Whether an error says that the client has hung up; not where ``unless`` was cancelled, by which others end it."""
    if isinstance(error, asyncio.CancelledError):
        return unless is None or not unless.cancelled()
    return isinstance(error, ConnectionError) and not isinstance(error, AglSlimeError)  # the engine's are both


def explain_once(refusal: GatewayRequestError, rollout_id: str, *, _told: set[str] = set()) -> None:  # noqa: B006
    """Log a request that is wrong, the first of each kind in this process: some clients swallow what they are told."""
    kind = f"{refusal.status} {refusal.code} {(refusal.param or '').partition('[')[0]}"
    if refusal.status in (400, 413) and kind not in _told and len(_told) < _MOST_EXPLAINED:
        _told.add(kind)
        text = "Rollout %s: a request was refused with %d: %s. Further ones like it are counted, not logged."
        logger.warning(text, rollout_id, refusal.status, str(refusal)[:500])


def openai_error(refusal: GatewayRequestError) -> dict[str, Any]:
    kind = _OPENAI_TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "server_error")
    return {"error": {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code}}


def anthropic_error(refusal: GatewayRequestError) -> dict[str, Any]:
    kind = _ANTHROPIC_TYPES.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
    message = f"prompt is too long: {refusal}" if refusal.code == "context_length_exceeded" else str(refusal)
    error: dict[str, Any] = {"type": kind, "message": message}
    if refusal.code in _ANTHROPICS_CODES:
        unsupported = {"unsupported": [refusal.param]} if refusal.code == THREADS_UNSUPPORTED else {}
        error["details"] = {"error_code": refusal.code, **unsupported}
    return {"type": "error", "error": error}
