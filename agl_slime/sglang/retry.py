"""What to do about a failure of the engine: one classification and one bounded retry loop.

Nothing above this module looks at a status code or an exception of aiohttp. Every failure becomes a ``Verdict``: the
typed error that the caller would get, and whether sending again can help.

| failure                                             | error                  | sent again                                  |
|-----------------------------------------------------|------------------------|---------------------------------------------|
| connection refused, reset, closed; broken body      | EngineUnreachableError | yes                                         |
| no answer within the idle timeout                   | EngineTimeoutError     | yes                                         |
| the call's deadline has passed                      | EngineTimeoutError     | no: no time is left                         |
| 408, 425, 429, every 5xx                            | EngineServerError      | yes, not before ``Retry-After``             |
| 400 that tells of the context length                | ContextOverflowError   | no: the same prompt is as long again        |
| 400 that tells of ids outside the vocabulary        | OutOfVocabularyError   | no                                          |
| other 4xx (duplicate rid, 401, 403, 404, 422, ...)  | EngineRequestError     | no                                          |
| 3xx, 200 that is not SGLang's JSON, broken HTTP     | EngineProtocolError    | at most twice: a proxy may have hiccupped   |
"""

from __future__ import annotations

import asyncio
import email.utils
import errno
import json
import logging
import random
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

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

logger = logging.getLogger(__name__)

T = TypeVar("T")

# SGLang's own words, 0.5.15 and 0.5.23: tokenizer_manager._validate_one_request, managers/utils.validate_input_length,
# tokenizer_manager._validate_input_ids_in_vocab
_CONTEXT_OVERFLOW = re.compile(
    r"longer than the model's context length|maximum context length of \d+ tokens|exceeds the maximum allowed length|context length exceeded",
    re.IGNORECASE,
)
_OUT_OF_VOCABULARY = re.compile(r"greater than the vocab size|out[- ]of[- ]vocabulary", re.IGNORECASE)
_CONTEXT_LIMIT = re.compile(r"maximum context length of (\d+) tokens", re.IGNORECASE)

_RETRIED_4XX = frozenset({408, 425, 429})

# An answer that is not SGLang's seldom becomes one: enough for a proxy's hiccup, and no more.
PROTOCOL_ERROR_RETRIES = 2


class HttpStatusError(Exception):
    """An answer with a status other than 200; never leaves the client (see ``classify``)."""

    def __init__(self, status: int, body: str, *, where: str, headers: Mapping[str, str]) -> None:
        super().__init__(f"{where} answered HTTP {status}")
        self.status = status
        self.body = body
        self.where = where
        self.headers = headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a failure means: ``error`` for the caller, ``retry`` when sending again can help, not sooner than
    ``after_s``, at most ``max_retries`` times (None: the settings')."""

    retry: bool
    error: EngineError
    after_s: float = 0.0
    max_retries: int | None = None


def classify(status: int, body: str, *, where: str = "the engine", headers: Mapping[str, str] | None = None) -> Verdict:
    """The verdict on an answer whose status is not 200. ``where`` names the URL in the error's text."""
    message = error_message(body)
    told = f"{where} answered HTTP {status}: {message}" if message else f"{where} answered HTTP {status} without a text"
    if status in _RETRIED_4XX or status >= 500:
        return Verdict(retry=True, error=EngineServerError(told), after_s=retry_after_s(headers))
    if status < 400:
        return Verdict(
            retry=True,
            error=EngineProtocolError(f"{told}; expected 200 from SGLang"),
            max_retries=PROTOCOL_ERROR_RETRIES,
        )
    if _CONTEXT_OVERFLOW.search(message):
        return Verdict(retry=False, error=ContextOverflowError(told))
    if _OUT_OF_VOCABULARY.search(message):
        return Verdict(retry=False, error=OutOfVocabularyError(told))
    if status in (401, 403):
        return Verdict(
            retry=False, error=EngineRequestError(f"{told}; set ClientSettings.api_key to the server's --api-key")
        )
    return Verdict(retry=False, error=EngineRequestError(told))


def classify_exception(exc: BaseException, *, where: str = "the engine") -> Verdict:
    """The verdict on anything that sending a request or reading its answer may raise. An exception that is none of the
    engine's is raised again as it is."""
    if isinstance(exc, HttpStatusError):
        return classify(exc.status, exc.body, where=exc.where, headers=exc.headers)
    if isinstance(exc, EngineProtocolError):
        return Verdict(retry=True, error=exc, max_retries=PROTOCOL_ERROR_RETRIES)
    if isinstance(exc, EngineError):
        return Verdict(retry=False, error=exc)
    if isinstance(exc, aiohttp.ClientSSLError):
        return Verdict(retry=False, error=EngineUnreachableError(f"{where} could not be reached by TLS: {exc}"))
    if isinstance(exc, (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError)):
        hint = (
            "; raise the limit of open files (ulimit -n) or lower ClientSettings.max_connections"
            if _out_of_files(exc)
            else ""
        )
        return Verdict(retry=True, error=EngineUnreachableError(f"{where} could not be reached: {_text(exc)}{hint}"))
    if isinstance(exc, (asyncio.TimeoutError, TimeoutError)):  # two classes on Python 3.10
        return Verdict(retry=True, error=EngineTimeoutError(f"{where} sent nothing within the idle timeout"))
    if isinstance(exc, aiohttp.ClientResponseError):
        return Verdict(
            retry=True,
            error=EngineProtocolError(f"{where} does not speak HTTP: {_text(exc)}"),
            max_retries=PROTOCOL_ERROR_RETRIES,
        )
    if isinstance(exc, (aiohttp.ClientError, OSError)):  # resets, disconnects, a body that ends too early
        return Verdict(retry=True, error=EngineUnreachableError(f"{where} broke the connection: {_text(exc)}"))
    raise exc


def error_message(body: str, limit: int = 500) -> str:
    """The sentence inside an error body: SGLang's ``{"error": {"message": ...}}``, OpenAI's and FastAPI's forms, or the
    start of the text."""
    try:
        found = json.loads(body)
    except ValueError:
        found = body
    for key in ("error", "message", "detail"):
        if isinstance(found, Mapping) and found.get(key):
            found = found[key]
    text = " ".join(_plain(found if isinstance(found, str) else json.dumps(found)).split()) if found else ""
    return text if len(text) <= limit else text[:limit] + "…"


def _plain(text: str) -> str:
    """Without the tags, when it is a page of some web server."""
    return (
        re.sub(r"<style.*?</style>|<[^<>]*>", " ", text, flags=re.DOTALL)
        if re.match(r"\s*<(!doctype|html)", text, re.IGNORECASE)
        else text
    )


def context_limit(error: ContextOverflowError) -> int | None:
    """The model's context length when the server refused prompt + max_new_tokens, not the prompt alone; else None."""
    found = _CONTEXT_LIMIT.search(str(error))
    return int(found.group(1)) if found else None


def retry_after_s(headers: Mapping[str, str] | None) -> float:
    """Seconds to wait by the ``Retry-After`` header, a number or an HTTP date (RFC 9110 §10.2.3); 0.0 when there is
    none that can be read."""
    value = (headers or {}).get("Retry-After", "").strip()
    if not value:
        return 0.0
    try:
        return max(0.0, float(value)) if float(value) < float("inf") else 0.0
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0


def backoff_s(retry: int, *, base_s: float, cap_s: float, rng: random.Random) -> float:
    """The pause before the ``retry``-th retry (from 0): uniform in [0, min(cap, base · 2^retry)], "full jitter".

    Source: M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015: of the jitters compared there it
    needs the fewest calls when many clients retry at once.
    """
    return rng.uniform(0.0, min(cap_s, base_s * 2.0 ** min(retry, 60)))


class RetryBudget:
    """Retries that a client may still make: each takes one, each answer gives one back up to the start value.

    One call's attempts are bounded by themselves; this bounds all calls together, so that thousands in flight do not go
    on hammering an engine that answers nobody. When it is used up, calls fail at their first failure until answers come
    again. Thread-safe.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._left = size
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        return self._left

    def take(self) -> bool:
        with self._lock:
            if self._left <= 0:
                return False
            self._left -= 1
            return True

    def give_back(self) -> None:
        with self._lock:
            self._left = min(self._size, self._left + 1)


class Retrier:
    """Runs attempts until one succeeds, its verdict is final, the attempts are used up, or the deadline would pass."""

    def __init__(
        self, *, max_attempts: int, base_s: float, cap_s: float, budget: RetryBudget, rng: random.Random | None = None
    ) -> None:
        self._max_attempts = max_attempts
        self._base_s = base_s
        self._cap_s = cap_s
        self._budget = budget
        self._rng = rng or random.Random()

    async def run(
        self,
        attempt: Callable[[int], Awaitable[T]],
        *,
        where: str,
        deadline: float,
        max_attempts: int | None = None,
    ) -> T:
        """``attempt(n)`` for n = 0, 1, ...; ``deadline`` is on ``time.monotonic``'s clock. Raises the typed error of
        the last failure."""
        started = time.monotonic()
        allowed = max_attempts or self._max_attempts
        # each kind of failure with a limit of its own is counted by its error's class
        failures: dict[type[EngineError], int] = {}
        for n in range(allowed):
            try:
                answer = await attempt(n)
            except Exception as exc:
                verdict = classify_exception(exc, where=where)
                cause = exc.__cause__ if exc is verdict.error else exc
            else:
                self._budget.give_back()
                return answer
            now = time.monotonic()
            kind = type(verdict.error)
            failures[kind] = failures.get(kind, 0) + 1
            if now >= deadline:
                raise _final(
                    EngineTimeoutError(
                        f"{where} did not answer within the time limit; the last failure: {verdict.error}"
                    ),
                    n + 1,
                    now - started,
                ) from cause
            out_of_retries = n + 1 >= allowed or (
                verdict.max_retries is not None and failures[kind] > verdict.max_retries
            )
            if not verdict.retry or out_of_retries:
                raise _final(verdict.error, n + 1, now - started) from cause
            # a wait that the server asked for is spread as well, or everyone comes back in the same instant
            pause = verdict.after_s + backoff_s(n, base_s=self._base_s, cap_s=self._cap_s, rng=self._rng)
            if now + pause >= deadline:
                raise _final(
                    verdict.error, n + 1, now - started, "; the time limit leaves no room for another"
                ) from cause
            if not self._budget.take():
                raise _final(
                    verdict.error, n + 1, now - started, "; the retry budget of all calls is used up"
                ) from cause
            logger.debug("%s; trying again in %.2f s (attempt %d of %d)", verdict.error, pause, n + 2, allowed)
            await asyncio.sleep(pause)
        raise AssertionError("unreachable: the last attempt returns or raises")


def _final(error: EngineError, attempts: int, seconds: float, why: str = "") -> EngineError:
    if attempts == 1 and not why:
        return error
    return type(error)(
        f"{error} (gave up after {attempts} attempt{'s' if attempts > 1 else ''} in {seconds:.1f} s{why})"
    )


def _out_of_files(exc: BaseException) -> bool:
    return isinstance(exc, OSError) and exc.errno in (errno.EMFILE, errno.ENFILE)


def _text(exc: BaseException) -> str:
    return str(exc) or type(exc).__name__
