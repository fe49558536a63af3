"""What clients do wrong, and engines: one sentence each, with the status that makes a client do the right thing, and
nothing lost elsewhere."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from openai import OpenAI

from agl_slime.errors import ConfigError
from agl_slime.gateway.server import Gateway
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.support.threads import run_blocking
from agl_slime.tokens import attributes as names
from agl_slime.tokens.span_codec import decode_turns
from tests.harness.engine_faults import BreakOff, Reset, Status
from tests.harness.gateway import BODY, CALL, HELLO, WEATHER, chat, posted_at_once, serving, trained_once


def told(answer: httpx.Response) -> str:
    return answer.json()["error"]["message"]


DEEP = "[" * 600 + "]" * 600
GARBAGE: list[tuple[bytes, str]] = [
    (b"{", "not JSON"),
    (b"[1]", "JSON object"),
    (b"\xff\xfe", "not JSON"),
    (b"", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'{"messages": 3}', "messages must be a list"),
    (b'{"messages": [{"role": "robot", "content": "x"}]}', "messages[0].role"),
    (b'{"messages": [{"role": "user", "content": 5}]}', "messages[0].content"),
    (b'{"messages":[{"role":"user","content":' + b"[" * 900 + b"]" * 900 + b"}]}", ""),
    (f'{{"messages":[{{"role":"user","content":"x"}}],"chat_template_kwargs":{{"a":{DEEP}}}}}'.encode(), "250 deep"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n must be"),
    ({"max_tokens": "many"}, "max_tokens must be"),
    ({"stop": [""]}, "stop must be"),
    ({"tools": [{"type": "x"}]}, "tools[0]"),
    ({"response_format": {"type": "x"}}, "response_format"),
    ({"chat_template_kwargs": {"tokenize": True}}, "tokenize"),
    ({"chat_template_kwargs": {"conversation": []}}, "conversation"),
    ({"chat_template_kwargs": {"chat_template": "{% for n in range(9) %}x{% endfor %}"}}, "chat_template"),
    ({"model": "judge", "top_p": 0}, "top_p"),
    ({"model": "judge", "top_p": 7}, "top_p"),
    ({"model": "judge", "temperature": -1}, "temperature"),
    ({"model": "judge", "top_k": 2**63}, "top_k"),
    ({"model": "judge", "seed": 2**63}, "seed"),
    ({"model": "judge", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"model": "judge", "logit_bias": {"1": "x"}}, "logit_bias"),
    ({"top_logprobs": 10**9}, "top_logprobs"),
]


@pytest.mark.parametrize(
    ("content", "says", "status"),
    [
        *((content, says, 400) for content, says in GARBAGE),
        *((json.dumps({**BODY, **wrong}).encode(), says, 400) for wrong, says in WRONG),
        (b"\x1f\x8b junk", "compressed", 415),
    ],
)
def test_garbage_is_refused_with_a_sentence(content: bytes, says: str, status: int) -> None:
    with serving("hello", settings=GatewaySettings(untrained_models=("judge",))) as case:
        packed = {"Content-Encoding": "gzip"} if status == 415 else {}
        answer = httpx.post(f"{case.llm.endpoint}/chat/completions", content=content, headers=packed)
        assert answer.status_code == status, answer.text
        assert told(answer)
        assert says in told(answer)
        assert chat(case).json()["choices"][0]["message"]["content"] == "hello"
        assert status == 415 or json.loads(case.summary[names.GATEWAY])["refused/400"] == 1


def test_lone_surrogate_in_request_is_read_as_replacement_character() -> None:
    with serving("hello") as case:
        body = b'{"messages": [{"role": "user", "content": "a\\ud83d"}]}'
        assert httpx.post(f"{case.llm.endpoint}/chat/completions", content=body).status_code == 200
        assert [*case.turns[0].messages] == [{"role": "user", "content": "a\ufffd"}]


def test_body_above_the_limit_is_413_and_one_below_is_read() -> None:
    with serving("hello", context_length=10**7) as case:
        assert chat(case, {**BODY, "user": "x" * 10_000_000}).status_code == 413
        assert chat(case, {**BODY, "user": "x" * 7_000_000}).status_code == 200


def test_nothing_is_answered_after_the_end_nor_at_anothers_address() -> None:
    with serving("hello") as case:
        attempt, served, spans = case.open("ro-2")
        other: Any = served["main_llm"]
        mine = case.llm.endpoint
        assert chat(case).status_code == 200
        stolen = other.endpoint.replace(other.api_key, case.llm.api_key)
        answer = httpx.post(f"{stolen}/chat/completions", json=BODY)
        assert (answer.status_code, "ro-2" in told(answer)) == (401, True)
        plain = other.endpoint.replace(f"/k/{other.api_key}", "")
        assert httpx.post(f"{plain}/chat/completions", json=BODY).status_code == 401
        with_key = {"Authorization": f"Bearer {other.api_key}"}
        assert httpx.post(f"{plain}/chat/completions", json=BODY, headers=with_key).status_code == 200
        root = case.gateway.url
        assert httpx.post(f"{root}/v1/messages", json={**BODY, "max_tokens": 9}, headers={"x-api-key": other.api_key})
        assert httpx.post(f"{root}/v1/chat/completions", json=BODY).status_code == 401
        assert httpx.post(f"{mine.replace('ro-1', 'ro-9')}/chat/completions", json=BODY).status_code == 404
        case.close()
        assert chat(case).status_code == 410
        with pytest.raises(openai.APIStatusError, match="has ended"):
            OpenAI(base_url=mine, api_key="x").chat.completions.create(model="m", messages=HELLO)
        assert httpx.post(f"{plain}/chat/completions", json=BODY, headers=with_key).status_code == 200
        assert len(case.turns) == 1
        assert len(spans) == 3
        assert not attempt.closed


@pytest.mark.parametrize(
    "path", ["generate", "pause_generation", "update_weights_from_disk", "flush_cache", "abort_request"]
)
def test_the_engines_own_routes_are_not_to_be_had(path: str) -> None:
    with serving("hello") as case:
        root = case.llm.endpoint.removesuffix("/v1")
        assert httpx.post(f"{root}/{path}", json={}).status_code == 404
        assert not case.engine.received


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
        # what was read of the stream is a turn, and nothing of the other, of which nothing was
        assert [span.name for span in case.spans].count(names.GENERATE_SPAN) == 1
        assert case.turns[0].finish_reason == "abort"
        assert case.turns[0].text.startswith("one")


def test_requests_above_max_in_flight_get_429_and_other_attempts_200() -> None:
    settings = GatewaySettings(max_in_flight=4)
    with serving("hello", settings=settings) as case:
        _, served, _ = case.open("ro-2")
        own, other = (f"{llm.endpoint}/chat/completions" for llm in (case.llm, served["main_llm"]))
        refused, answers = posted_at_once(case, own, 12, answered=8, elsewhere=[other])
        assert {(answer.status_code, answer.headers["Retry-After"]) for answer in refused} == {(429, "1")}
        assert [answer.status_code for answer in answers] == [200] * 5


@pytest.mark.parametrize(
    ("fault", "status", "kind"),
    [
        (
            Status(400, "The input (5000 tokens) is longer than the model's context length (4096 tokens)."),
            400,
            "context",
        ),
        (Status(422, "no such thing"), 400, "no such thing"),
        (Status(503, "full"), 429, "full"),
        (Reset(), 503, "could not"),
    ],
)
def test_engine_errors_have_the_status_codes_that_clients_expect(fault: Any, status: int, kind: str) -> None:
    with serving("hello") as case:
        case.engine.script("/generate", fault, fault, fault)
        answer = chat(case)
        assert answer.status_code == status, answer.text
        assert kind in answer.text or status == 503
        case.engine.script("/generate")
        assert (answer.json()["error"]["code"] == "context_length_exceeded") == (kind == "context")
        case.engine._scripts.clear()
        assert chat(case).status_code == 200
        trained_once(case.turns, case.segments)


def test_too_long_prompt_is_an_error_in_each_protocols_words() -> None:
    with serving("hello", context_length=40) as case:
        long = {**BODY, "messages": [{"role": "user", "content": "x " * 100}]}
        with pytest.raises(openai.BadRequestError, match="maximum context length") as raised:
            OpenAI(base_url=case.llm.endpoint, api_key="x").chat.completions.create(**long)
        assert raised.value.code == "context_length_exceeded"
        answer = httpx.post(f"{case.llm.endpoint}/messages", json={**long, "max_tokens": 9})
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert told(answer).startswith("prompt is too long")


def test_context_overflow_is_a_400_and_keeps_earlier_turns() -> None:
    with serving("hello", context_length=60) as case:
        assert chat(case).status_code == 200
        grown = [*HELLO, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "x " * 100}]
        answer = chat(case, {**BODY, "messages": grown})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        case.close()
        assert case.summary[names.STOP_REASON] == "context_overflow"
        assert len(case.turns) == 1


def test_the_runs_context_length_is_kept_for_agents_that_do_not_send_it() -> None:
    """slime's ``--rollout-max-context-len``, below the engine's limit."""
    with serving("hello", "x " * 200, sampling={"context_length": 60}) as case:
        assert "context_length" not in case.llm.sampling_parameters
        assert chat(case).status_code == 200
        answer = chat(case, {**BODY, "messages": [{"role": "user", "content": "y"}]})
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        used = answer.json()["usage"]
        assert used["prompt_tokens"] + used["completion_tokens"] == 60
        grown = [*HELLO, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "x " * 100}]
        refused = chat(case, {**BODY, "messages": grown})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        case.close()
        assert len(case.payloads) == len(case.turns) == 2
        assert case.summary[names.STOP_REASON] == "context_overflow"


def test_broken_engine_stream_is_resumed_in_place() -> None:
    with serving("one two three four five six") as case:
        case.engine.script("/generate", BreakOff(5), BreakOff(3))
        client = OpenAI(base_url=case.llm.endpoint, api_key="x", max_retries=0)
        chunks = list(client.chat.completions.create(model="m", messages=HELLO, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two three four five six"
        assert case.tokenizer.decode(case.turns[0].response_ids) == "one two three four five six<|im_end|>"
        assert case.turns[0].resumed >= 1
        assert case.engine.calls["/generate"] == 3


def test_a_silent_stream_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_slime.gateway.server._MAX_SILENCE_S", 0.05)
    with serving("hello", latency_s=0.3) as case:
        streamed = {**BODY, "stream": True}
        assert chat(case, streamed).text.count(": keep-alive") >= 3
        message = httpx.post(f"{case.llm.endpoint}/messages", json={**streamed, "max_tokens": 9})
        assert message.text.count("event: ping") >= 3


def test_beyond_its_turns_a_rollout_gets_empty_answers_and_then_none() -> None:
    with serving("hello", settings=GatewaySettings(max_turns=2)) as case:
        texts = [chat(case).json()["choices"][0]["message"]["content"] for _ in range(4)]
        assert texts == ["hello", "hello", "", ""]
        statuses = {chat(case).status_code for _ in range(12)}
        assert statuses == {200, 429}
        assert len(case.turns) == 2
        case.close()
        assert json.loads(case.summary[names.GATEWAY])["stopped/max_turns"] > 2
        assert case.summary[names.STOP_REASON] == "max_turns"


def test_closed_attempt_is_freed_without_garbage_collection() -> None:
    with serving(CALL, "Sunny.") as case:
        attempt, served, _ = case.open("ro-2")
        asked = [{"role": "user", "content": "The weather?"}]
        for _ in range(2):
            body = {"messages": asked, "tools": [WEATHER]}
            answer = httpx.post(f"{served['main_llm'].endpoint}/chat/completions", json=body).json()
            said = answer["choices"][0]["message"]
            calls = said.get("tool_calls", [])
            asked += [said, *({"role": "tool", "tool_call_id": call["id"], "content": "fine"} for call in calls)]
        run_blocking(case.gateway.close(attempt))
        held = [weakref.ref(attempt), weakref.ref(attempt._root)]
        gc.disable()
        try:
            del attempt
            assert [ref() for ref in held] == [None, None]
        finally:
            gc.enable()


def test_an_agents_many_rollouts_keep_their_spans_apart() -> None:
    with serving("hello") as case, ThreadPoolExecutor(16) as pool:
        opened = [case.open(f"ro-{n}") for n in range(10, 74)]

        def run(served: Any) -> int:
            body = {"model": "m", "messages": [{"role": "user", "content": served.endpoint}]}
            return httpx.post(f"{served.endpoint}/chat/completions", json=body).status_code

        assert set(pool.map(run, [served["main_llm"] for _, served, _ in opened])) == {200}
        for attempt, _, spans in opened:
            assert len(spans) == 1
            assert attempt.rollout_id in spans[0].attributes[names.MESSAGES_NEW]


@pytest.mark.slow
async def test_a_thousand_rollouts_at_once_keep_their_spans_apart() -> None:
    with serving("hello", latency_s=0.5) as case:
        opened = [case.open(f"ro-{n}") for n in range(10_000, 11_024)]

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def ask(address: str, said: str, then: list[Any]) -> str:
                body = {"model": "m", "messages": [{"role": "user", "content": said}, *then]}
                async with session.post(f"{address}/chat/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    return (await answer.json())["choices"][0]["message"]["content"]

            async def run(llm: Any) -> None:
                said = await ask(llm.endpoint, llm.endpoint, [])
                turns = [{"role": "assistant", "content": said}, {"role": "user", "content": "And?"}]
                await ask(llm.endpoint, llm.endpoint, turns)

            await asyncio.gather(*(run(served["main_llm"]) for _, served, _ in opened))
        assert case.engine.most_running > 500
        for attempt, _, spans in opened:
            turns = decode_turns(spans)
            assert [turn.fork for turn in turns] == [None, None]
            assert all(attempt.rollout_id in str(turn.messages) for turn in turns)


def test_unusable_listen_address_is_a_config_error_at_each_start() -> None:
    gateway = Gateway(GatewaySettings(host="x" * 70))  # no name has so long a part, which is no error of the system's
    for _ in range(2):
        with pytest.raises(ConfigError, match="the gateway cannot listen on xxx"):
            gateway.start()
