"""Every failure of the engine has one verdict."""

import email.utils
import errno
import json
import time
from typing import Any

import aiohttp
import pytest

from agl_slime.engine.client.retry import check_event, context_limit, engine_error, refusal, retry_after_s
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


def sglangs(message: str) -> str:
    return json.dumps({"error": {"message": message}})


# SGLang's messages, 0.5.15.post1
PROMPT_TOO_LONG = sglangs("The input (5000 tokens) is longer than the model's context length (4096 tokens).")
TOTAL_TOO_LONG = sglangs(
    "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of 4100 "
    "tokens: 4000 tokens from the input messages and 100 tokens for the completion. Please reduce the number of tokens."
)
POOL_TOO_SMALL = sglangs(
    "Input length (70000 tokens) exceeds the maximum allowed length (65530 tokens). Use a shorter input."
)
BAD_ID = sglangs("The input_ids [999] contains values greater than the vocab size (460).")


@pytest.mark.parametrize(
    ("status", "body", "error", "retry"),
    [
        (400, PROMPT_TOO_LONG, ContextOverflowError, False),
        (400, TOTAL_TOO_LONG, ContextOverflowError, False),
        (400, POOL_TOO_SMALL, ContextOverflowError, False),
        (400, BAD_ID, OutOfVocabularyError, False),
        (400, sglangs("Duplicate request ID detected: 12ab"), EngineRequestError, False),
        (401, '{"error": "Unauthorized"}', EngineRequestError, False),
        (422, "", EngineRequestError, False),
        (301, "", EngineProtocolError, True),
        (408, "", EngineServerError, True),
        (429, "", EngineServerError, True),
        (500, "x" * 100_000, EngineServerError, True),
        (503, '{"detail": "The request queue is full."}', EngineServerError, True),
    ],
)
def test_each_status_maps_to_an_error_and_a_retry_flag(status: int, body: str, error: type[EngineError], retry: bool):
    refused = refusal(status, body, endpoint="http://h:1/generate")
    assert type(refused) is error
    assert refused.transient is retry
    assert refused.status == status
    assert f"HTTP {status}" in str(refused)
    assert "http://h:1/generate" in str(refused)
    assert len(str(refused)) < 700


@pytest.mark.parametrize(
    "body", ['{"error": {"message": "why"}}', '{"message": "why"}', '{"detail": "why"}', '{"error": "why"}', "why"]
)
def test_the_reason_is_read_in_every_form(body: str) -> None:
    assert str(refusal(500, body)).endswith("HTTP 500: why")


def test_context_limit_only_from_the_total_refusal() -> None:
    total, prompt = refusal(400, TOTAL_TOO_LONG), refusal(400, PROMPT_TOO_LONG)
    assert isinstance(total, ContextOverflowError)
    assert isinstance(prompt, ContextOverflowError)
    assert context_limit(total) == 4096
    assert context_limit(prompt) is None


@pytest.mark.parametrize(
    ("exc", "error", "retry"),
    [
        (TimeoutError(), EngineTimeoutError, True),
        (aiohttp.SocketTimeoutError("Timeout on reading data from socket"), EngineTimeoutError, True),
        (aiohttp.ConnectionTimeoutError("Connection timeout"), EngineUnreachableError, True),
        (aiohttp.ServerDisconnectedError(), EngineUnreachableError, True),
        (aiohttp.ClientOSError(errno.ECONNRESET, "reset"), EngineUnreachableError, True),
        (aiohttp.ClientPayloadError("not enough data"), EngineUnreachableError, True),
        (EngineProtocolError("no meta_info"), EngineProtocolError, True),
        (refusal(400, BAD_ID), OutOfVocabularyError, False),
    ],
)
def test_each_exception_maps_to_an_error_and_a_retry_flag(exc: Exception, error: type[EngineError], retry: bool):
    verdict = engine_error(exc)
    assert type(verdict) is error
    assert verdict.transient is retry


def test_a_programming_error_is_not_the_engines() -> None:
    with pytest.raises(ZeroDivisionError):
        engine_error(ZeroDivisionError())


def test_retry_after_is_seconds_or_a_date() -> None:
    for value, seconds in (("7", 7.0), ("0.25", 0.25), ("-3", 0.0), ("soon", 0.0), ("nan", 0.0), ("inf", 0.0)):
        assert retry_after_s({"Retry-After": value}) == seconds
    value = email.utils.formatdate(time.time() + 30, usegmt=True)
    assert 25 < retry_after_s({"Retry-After": value}) <= 30
    assert retry_after_s({"Retry-After": email.utils.formatdate(time.time() - 30, usegmt=True)}) == 0.0


def test_a_stream_of_pieces_is_not_taken_for_the_answer() -> None:
    def event(listed: int, completed: int) -> dict[str, Any]:
        meta = {"output_token_logprobs": [[-0.5, 7, None]] * listed, "completion_tokens": completed}
        return {"text": "x", "output_ids": [7] * listed, "meta_info": {**meta, "finish_reason": None}}

    for whole in (event(1, 1), event(12, 12), {"meta_info": {"completion_tokens": 2}}, "no object"):
        check_event(whole, endpoint="/generate")
    with pytest.raises(EngineProtocolError, match="start SGLang without --incremental-streaming-output"):
        check_event(event(2, 3), endpoint="/generate")  # the second event of 0.5.15 with that flag
