"""Classification of the engine's failures, for the transport's retry loop.

Every failure becomes the typed error that the caller would get; its class says whether sending again can help.

| failure                                            | error                  | sent again                             |
|----------------------------------------------------|------------------------|----------------------------------------|
| connection refused, reset, closed; broken body     | EngineUnreachableError | yes                                    |
| no answer within the idle timeout                  | EngineTimeoutError     | yes                                    |
| the call's deadline has passed                     | EngineTimeoutError     | no: no time is left                    |
| 408, 425, 429, every 5xx                           | EngineServerError      | yes, not before ``Retry-After``        |
| 400 about the context length                       | ContextOverflowError   | no                                     |
| 400 about ids outside the vocabulary               | OutOfVocabularyError   | no                                     |
| other 4xx (duplicate rid, 401, 403, 404, 422, ...) | EngineRequestError     | no                                     |
| 3xx, 200 that is not SGLang's JSON, broken HTTP    | EngineProtocolError    | at most twice, for a proxy's hiccup    |
| an answer of SGLang's that cannot be right         | EngineProtocolError    | no: it costs its rollout               |
"""

from __future__ import annotations

import email.utils
import errno
import json
import re
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from agl_slime.errors import (
    ContextOverflowError,
    EngineError,
    EngineProtocolError,
    EngineRequestError,
    EngineServerError,
    EngineTimeoutError,
    EngineUnreachableError,
    OutOfVocabularyError,
)
from agl_slime.support.http import RETRIED_4XX

# SGLang's messages, 0.5.15 and 0.5.23: tokenizer_manager._validate_one_request, managers/utils.validate_input_length,
# tokenizer_manager._validate_input_ids_in_vocab
_CONTEXT_OVERFLOW = re.compile(
    r"longer than the model's context length|maximum context length of \d+ tokens|exceeds the maximum allowed length"
    r"|context length exceeded",
    re.IGNORECASE,
)
_OUT_OF_VOCABULARY = re.compile(r"greater than the vocab size|out[- ]of[- ]vocabulary", re.IGNORECASE)
_CONTEXT_LIMIT = re.compile(r"maximum context length of (\d+) tokens", re.IGNORECASE)

# An answer that is not SGLang's seldom becomes one: enough for a proxy's hiccup, and no more.
PROTOCOL_ERROR_RETRIES = 2


def refusal(
    status: int, body: str, *, endpoint: str = "the engine", headers: Mapping[str, str] | None = None
) -> EngineError:
    """The error of an answer whose status is not 200. ``endpoint`` is the URL in its text."""
    message = error_message(body)
    text = f"{endpoint} answered HTTP {status}: {message or 'no text'}"
    if status in RETRIED_4XX or status >= 500:
        error = EngineServerError(text)
        error.retry_after_s = retry_after_s(headers)
    elif status < 400:
        error = EngineProtocolError(f"{text}; expected 200 from SGLang")
    elif _CONTEXT_OVERFLOW.search(message):
        error = ContextOverflowError(text)
    elif _OUT_OF_VOCABULARY.search(message):
        error = OutOfVocabularyError(text)
    else:
        key = "; set ClientSettings.api_key to the server's --api-key" if status in (401, 403) else ""
        error = EngineRequestError(text + key)
    error.status = status
    return error


def impossible_answer(text: str) -> EngineProtocolError:
    """The error of an answer in SGLang's form that cannot be right; a second one could be chosen by its content."""
    error = EngineProtocolError(text)
    error.transient = False
    return error


def check_event(event: Any, *, endpoint: str) -> None:
    """Raises the error in a stream's event, and ``EngineProtocolError`` for an event with the newest tokens only: the
    last event must be the whole answer."""
    if not isinstance(event, dict):
        return
    if isinstance(error := event.get("error"), dict):
        code = error.get("code")
        raise refusal(code if type(code) is int else 400, json.dumps(event), endpoint=endpoint)
    meta = event["meta_info"] if isinstance(event.get("meta_info"), dict) else {}
    listed, count = meta.get("output_token_logprobs"), meta.get("completion_tokens")
    if isinstance(listed, list) and isinstance(count, int) and len(listed) < count:
        problem = f"{endpoint} streams only the newest tokens in each event"
        raise EngineProtocolError(f"{problem}: start SGLang without --incremental-streaming-output")


def engine_error(exc: BaseException, *, endpoint: str = "the engine") -> EngineError:
    """The error of anything that sending a request or reading its answer may raise. An exception that is none of the
    engine's is raised again as it is."""
    text = str(exc) or type(exc).__name__
    if isinstance(exc, EngineError):
        return exc
    if isinstance(exc, RecursionError):
        return impossible_answer(f"{endpoint} answered JSON that is nested too deep")
    if isinstance(exc, aiohttp.ClientSSLError):
        error = EngineUnreachableError(f"{endpoint} could not be reached by TLS: {text}")
        error.transient = False
        return error
    if isinstance(exc, (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError)):
        if isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE):
            text += "; raise the limit of open files (ulimit -n) or lower ClientSettings.max_connections"
        return EngineUnreachableError(f"{endpoint} could not be reached: {text}")
    if isinstance(exc, TimeoutError):
        return EngineTimeoutError(f"{endpoint} sent nothing within the idle timeout")
    if isinstance(exc, aiohttp.ClientResponseError):
        return EngineProtocolError(f"{endpoint} does not speak HTTP: {text}")
    if isinstance(exc, (aiohttp.ClientError, OSError)):  # resets, disconnects, a body that ends too early
        return EngineUnreachableError(f"{endpoint} broke the connection: {text}")
    raise exc


def error_message(body: str, limit: int = 500) -> str:
    """The sentence inside an error body: SGLang's ``{"error": {"message": ...}}``, OpenAI's and FastAPI's forms, or the
    start of the text, of a web page without its tags."""
    try:
        content = json.loads(body)
    except ValueError:
        content = body
    for key in ("error", "message", "detail"):
        if isinstance(content, Mapping) and content.get(key):
            content = content[key]
    text = content if isinstance(content, str) else json.dumps(content) if content else ""
    if re.match(r"\s*<(!doctype|html)", text, re.IGNORECASE):
        text = re.sub(r"<style.*?</style>|<[^<>]*>", " ", text, flags=re.DOTALL)
    text = " ".join(text.split())
    return text if len(text) <= limit else text[:limit] + "…"


def context_limit(error: ContextOverflowError) -> int | None:
    """The model's context length when the server refused prompt + max_new_tokens, not the prompt alone; else None."""
    match = _CONTEXT_LIMIT.search(str(error))
    return int(match.group(1)) if match else None


def retry_after_s(headers: Mapping[str, str] | None) -> float:
    """Seconds by the header ``Retry-After``, a number or a date (RFC 9110 §10.2.3); 0.0 without a readable one."""
    value = (headers or {}).get("Retry-After", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (TypeError, ValueError):
            return 0.0
    return max(0.0, seconds) if seconds < float("inf") else 0.0
