"""Mistakes of clients, and of engines: one sentence each, with the status that makes a client do the right thing, and
no loss elsewhere."""

import asyncio
import gc
import gzip
import json
import weakref
from typing import Any

import aiohttp
import httpx
import pytest

from agl_slime.errors import ConfigError
from agl_slime.gateway.server import Gateway
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.support.threads import run_blocking
from agl_slime.tokens import attributes as names
from tests.gateway.protocols import assistant, body_of, error_text, user
from tests.harness.engine_faults import Reset, Status
from tests.harness.gateway import (
    BODY,
    CALL,
    HELLO,
    WEATHER,
    Case,
    chat,
    gateway_counts,
    posted_at_once,
    serving,
    trained_once,
)

DEEP = "[" * 600 + "]" * 600
GARBAGE: list[tuple[bytes, str]] = [
    (b"{", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'{"messages": [{"role": "robot", "content": "x"}]}', "messages[0].role"),
    (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content"),
    (b'{"messages":[{"role":"user","content":' + b"[" * 900 + b"]" * 900 + b"}]}", ""),
    (f'{{"messages":[{{"role":"user","content":"x"}}],"chat_template_kwargs":{{"a":{DEEP}}}}}'.encode(), "250 deep"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n must be"),
    ({"max_tokens": "many"}, "max_tokens must be"),
    ({"tools": [{"type": "x"}]}, "tools[0]"),
    ({"response_format": {"type": "x"}}, "response_format"),
    ({"chat_template_kwargs": {"chat_template": "{% for n in range(9) %}x{% endfor %}"}}, "chat_template"),
    ({"model": "judge", "top_p": 0}, "top_p"),
    ({"model": "judge", "temperature": -1}, "temperature"),
    ({"model": "judge", "seed": 2**63}, "seed"),
    ({"model": "judge", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"top_logprobs": 10**9}, "top_logprobs"),
]
REFUSED = [*GARBAGE, *((json.dumps({**BODY, **fields}).encode(), text) for fields, text in WRONG)]


def answer_of(case: Case, content: bytes, **headers: str) -> httpx.Response:
    return httpx.post(f"{case.llm.endpoint}/chat/completions", content=content, headers=headers)


@pytest.mark.parametrize(("content", "text"), REFUSED)
def test_garbage_is_refused_with_a_sentence(content: bytes, text: str) -> None:
    with serving("hello", settings=GatewaySettings(untrained_models=("judge",))) as case:
        refused = answer_of(case, content)
        assert refused.status_code == 400, refused.text
        assert error_text(refused)
        assert text in error_text(refused)
        assert chat(case).json()["choices"][0]["message"]["content"] == "hello"
        assert gateway_counts(case)["refused/400"] == 1


def test_compressed_body_is_read_and_lone_surrogate_is_replaced() -> None:
    with serving("hello") as case:
        raw = b'{"messages": [{"role": "user", "content": "a\\ud83d"}]}'
        assert answer_of(case, gzip.compress(raw), **{"Content-Encoding": "gzip"}).status_code == 200
        assert [*case.turns[0].messages] == [user("a\ufffd")]
        broken = answer_of(case, b"\x1f\x8b junk", **{"Content-Encoding": "gzip"})
        assert (broken.status_code, "it is no gzip" in error_text(broken)) == (400, True)


def test_body_above_the_limit_is_413_and_one_below_is_read() -> None:
    with serving("hello", context_length=10**7) as case:
        assert chat(case, {**BODY, "user": "x" * 10_000_000}).status_code == 413
        assert chat(case, {**BODY, "user": "x" * 7_000_000}).status_code == 200


def test_nothing_is_answered_after_the_end_nor_at_anothers_address() -> None:
    with serving("hello") as case:
        attempt, served, spans = case.open("ro-2")
        second: Any = served["main_llm"]
        first = case.llm.endpoint

        def status(url: str, **headers: str) -> int:
            return httpx.post(f"{url}/chat/completions", json=BODY, headers=headers).status_code

        assert chat(case).status_code == 200
        stolen = httpx.post(f"{second.endpoint.replace(second.api_key, case.llm.api_key)}/chat/completions", json=BODY)
        assert (stolen.status_code, "ro-2" in error_text(stolen)) == (401, True)
        plain = second.endpoint.replace(f"/k/{second.api_key}", "")
        key = {"Authorization": f"Bearer {second.api_key}"}
        assert status(plain) == 401
        assert status(plain, **key) == 200
        root, messages = case.gateway.url, body_of("messages", HELLO)
        assert httpx.post(f"{root}/v1/messages", json=messages, headers={"x-api-key": second.api_key}).is_success
        assert status(f"{root}/v1") == 401
        assert status(first.replace("ro-1", "ro-9")) == 404
        case.close()
        ended = chat(case)
        assert (ended.status_code, "has ended" in error_text(ended)) == (410, True)
        assert status(plain, **key) == 200
        assert len(case.turns) == 1
        assert len(spans) == 3
        assert not attempt.closed


async def test_end_of_a_rollout_aborts_its_requests() -> None:
    with serving("one two three four five six seven", token_s=0.05) as case:
        url = f"{case.llm.endpoint}/chat/completions"
        async with aiohttp.ClientSession() as session:
            whole = asyncio.ensure_future(session.post(url, json=BODY))
            stream = await session.post(url, json={**BODY, "stream": True})
            events = [await stream.content.readuntil(b"\n\n") for _ in range(4)]
            assert b"content" in events[-1]
            await case.gateway.close(case.attempt)
            assert (await whole).status == 410
            assert b"rollout_ended" in await stream.content.read()
        assert case.attempt.closed
        # the delivered part of the stream is a turn; the whole answer, of which no part was delivered, is none
        assert [span.name for span in case.spans].count(names.GENERATE_SPAN) == 1
        assert case.turns[0].finish_reason == "abort"
        assert case.turns[0].text.startswith("one")


def test_requests_above_max_in_flight_get_429_and_other_attempts_200() -> None:
    with serving("hello", settings=GatewaySettings(max_in_flight=4)) as case:
        _, served, _ = case.open("ro-2")
        busy, idle = (f"{llm.endpoint}/chat/completions" for llm in (case.llm, served["main_llm"]))
        refused, answers = posted_at_once(case, busy, 12, answered=8, elsewhere=[idle])
        assert {(answer.status_code, answer.headers["Retry-After"]) for answer in refused} == {(429, "1")}
        assert [answer.status_code for answer in answers] == [200] * 5


LONG = "The input (5000 tokens) is longer than the model's context length (4096 tokens)."


@pytest.mark.parametrize(
    ("fault", "status", "text"),
    [
        (Status(400, LONG), 400, "context_length_exceeded"),
        (Status(422, "no such thing"), 400, "no such thing"),
        (Status(503, "full"), 429, "full"),
        (Reset(), 503, ""),
    ],
)
def test_engine_errors_have_the_status_codes_that_clients_expect(fault: Any, status: int, text: str) -> None:
    with serving("hello") as case:
        case.engine.script("/generate", fault, fault, fault)
        answer = chat(case)
        assert (answer.status_code, text in answer.text) == (status, True), answer.text
        assert (answer.json()["error"]["code"] == "context_length_exceeded") == (text == "context_length_exceeded")
        case.engine._scripts.clear()
        assert chat(case).status_code == 200
        trained_once(case.turns, case.segments)


@pytest.mark.parametrize("limit", [{"context_length": 60}, {"sampling": {"context_length": 60}}], ids=["engine", "run"])
def test_context_overflow_is_an_error_in_protocols_words_and_keeps_turns(limit: Any) -> None:
    """By the engine's limit, and by slime's ``--rollout-max-context-len``, which agents do not send."""
    long = [*HELLO, assistant("hello"), user("x " * 100)]
    with serving("hello", "x " * 200, **limit) as case:
        assert "context_length" not in case.llm.sampling_parameters
        assert chat(case).status_code == 200
        answer = chat(case, {**BODY, "messages": [user("y")]}).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"] <= 60
        refused = chat(case, {**BODY, "messages": long})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "maximum context length" in error_text(refused)
        refused = httpx.post(f"{case.llm.endpoint}/messages", json=body_of("messages", long))
        assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
        assert error_text(refused).startswith("prompt is too long")
        case.close()
        assert len(case.turns) == 2
        assert case.summary[names.STOP_REASON] == "context_overflow"


def test_a_silent_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_slime.gateway.server._MAX_SILENCE_S", 0.05)
    with serving("hello", latency_s=0.3) as case:
        assert chat(case, {**BODY, "stream": True}).text.count(": keep-alive") >= 3
        message = httpx.post(f"{case.llm.endpoint}/messages", json=body_of("messages", HELLO, stream=True))
        assert message.text.count("event: ping") >= 3


def test_beyond_its_turns_a_rollout_gets_empty_answers_and_then_none() -> None:
    with serving("hello", settings=GatewaySettings(max_turns=2)) as case:
        texts = [chat(case).json()["choices"][0]["message"]["content"] for _ in range(4)]
        assert texts == ["hello", "hello", "", ""]
        assert {chat(case).status_code for _ in range(12)} == {200, 429}
        assert len(case.turns) == 2
        case.close()
        assert gateway_counts(case)["stopped/max_turns"] > 2
        assert case.summary[names.STOP_REASON] == "max_turns"


def test_failed_requests_count_against_the_most_that_a_rollout_may_make(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_slime.gateway.attempt.MAX_REQUESTS", 3)
    with serving("hello") as case:
        case.engine.script("/generate", *[Status(422, "no")] * 3)
        assert [chat(case).status_code for _ in range(4)] == [400, 400, 400, 429]


def test_closed_attempt_is_freed_without_garbage_collection() -> None:
    with serving(CALL, "Sunny.") as case:
        attempt, served, _ = case.open("ro-2")
        messages = [user("The weather?")]
        for _ in range(2):
            body = {"messages": messages, "tools": [WEATHER]}
            answer = httpx.post(f"{served['main_llm'].endpoint}/chat/completions", json=body).json()
            message = answer["choices"][0]["message"]
            calls = message.get("tool_calls", [])
            messages += [message, *({"role": "tool", "tool_call_id": call["id"], "content": "fine"} for call in calls)]
        run_blocking(case.gateway.close(attempt))
        references = [weakref.ref(attempt), weakref.ref(attempt._first_session)]
        gc.disable()
        try:
            del attempt
            assert [reference() for reference in references] == [None, None]
        finally:
            gc.enable()


def test_unusable_listen_address_is_a_config_error_at_each_start() -> None:
    gateway = Gateway(GatewaySettings(host="x" * 70))  # a part of a name that is too long is no error of the system's
    for _ in range(2):
        with pytest.raises(ConfigError, match="the gateway cannot listen on xxx"):
            gateway.start()
