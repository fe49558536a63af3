"""Clients that retry, hang up, and ask for too much at once: each answer goes to one of them, and tokens that a client
has read are trained."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import pytest

from agl_slime.agent.access import EngineAccess
from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.errors import EngineUnreachableError
from agl_slime.gateway.chat import ChatCompletions
from agl_slime.gateway.settings import GatewaySettings
from agl_slime.store.bridge import BridgeStore
from agl_slime.store.client import RemoteStore
from agl_slime.store.server import StoreService
from agl_slime.support.agl import ProxyLLM, Span, emit_reward, make_link_attributes
from agl_slime.support.threads import run_blocking
from agl_slime.tokens import attributes as names
from agl_slime.tokens.forks import ForkReason
from agl_slime.tokens.reward import read_turn_rewards
from agl_slime.tokens.span_codec import decode_turns
from tests.gateway.protocols import assistant, events_of, user
from tests.gateway.test_store import begun, beside
from tests.gateway.test_store import chats_url as attempt_url
from tests.harness.gateway import (
    BODY,
    HELLO,
    QUICK,
    WEATHER,
    Case,
    chat,
    gateway_counts,
    posted_at_once,
    serving,
    trained_once,
)
from tests.harness.waiting import until

RETRY = {"x-stainless-retry-count": "1"}


def text(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def chats_url(case: Case) -> str:
    return f"{case.llm.endpoint}/chat/completions"


def test_old_requests_repeated_after_a_burst_are_answered() -> None:
    with serving("hello", latency_s=0.3) as case, ThreadPoolExecutor(40) as pool, httpx.Client() as client:
        bodies = [{"messages": [user(str(n))]} for n in range(40)]
        burst = pool.map(lambda body: client.post(chats_url(case), json=body), bodies)
        assert {answer.status_code for answer in burst} == {200}
        case.engine.latency_s = 0.0
        for body in (*bodies[:3], *bodies):
            assert client.post(chats_url(case), json=body).status_code == 200
        trained_once(case.turns, case.segments)


def test_refused_request_is_not_answered_from_an_equal_request() -> None:
    settings, says = GatewaySettings(max_in_flight=3), ("one", "two", "three", "four")
    with serving(*says, settings=settings) as case:
        (refused,), answers = posted_at_once(case, chats_url(case), 4, answered=1)
        assert refused.status_code == 429
        texts = [text(answer) for answer in answers]
        texts.append(text(chat(case, headers=RETRY)))
        assert sorted(texts) == sorted(says)
        # several equal requests were answered: which answer was lost is not guessed
        assert text(chat(case, headers=RETRY)) == "four"
        assert len(case.turns) == 5


def test_tools_that_differ_from_rollout_to_rollout_are_no_forks() -> None:
    """More sets of tools in flight than templates are cached."""
    with serving("hello  \n") as case, httpx.Client() as client:
        opened = [case.open(f"ro-{n}") for n in range(10, 80)]
        for messages in (HELLO, [*HELLO, assistant("hello"), user("And?")]):
            for n, (_, served, _) in enumerate(opened):
                tool = {**WEATHER, "function": {**WEATHER["function"], "name": f"weather_{n}"}}
                body = {"messages": messages, "tools": [tool]}
                answer = client.post(f"{served['main_llm'].endpoint}/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
        for _, _, spans in opened:
            assert [turn.fork for turn in decode_turns(spans)] == [None, None]


async def read_some(case: Case, session: aiohttp.ClientSession, messages: list[Any], events: int) -> str:
    """The text of the first events of a stream, after which the client leaves."""
    received = ""
    async with session.post(chats_url(case), json={"messages": messages, "stream": True}) as answer:
        for _ in range(events):
            event = (await answer.content.readuntil(b"\n\n")).removeprefix(b"data: ")
            received += json.loads(event)["choices"][0]["delta"].get("content") or ""
        answer.close()
    return received


@pytest.mark.parametrize("trim", [0, 2])
async def test_partly_read_stream_is_a_turn(trim: int) -> None:
    says = "one two three four five six seven eight nine ten eleven twelve", "fine"
    with serving(*says, token_s=0.05) as case:
        async with aiohttp.ClientSession() as session:
            received = await read_some(case, session, HELLO, 5)
            await until(lambda: len(case.turns) >= 1)
            turn = case.turns[0]
            assert (turn.finish_reason, turn.untrained) == ("abort", "")
            assert case.tokenizer.decode(turn.response_ids) == turn.text
            assert turn.text.startswith(received)
            assert received
            case.engine.token_s = 0.0
            # the client continues from the text that it read, or from a part of it
            continued = (turn.text if not trim else received[:-trim]).strip()
            await read_some(case, session, [*HELLO, assistant(continued), user("And?")], 2)
            await until(lambda: len(case.turns) >= 2)
        assert case.turns[1].fork is (None if not trim else ForkReason.BRANCH)
        trained_once(case.turns, case.segments)
        case.close()
        assert names.UNTRAINED_TURNS not in case.summary


async def test_client_disconnect_during_span_write_loses_no_turn() -> None:
    store = BridgeStore()
    with StoreService(store=store) as service, beside(RemoteStore(service.url), "one", "two") as (gateway, _):
        rollout_id, attempt_id = await begun(store)
        writing, released = asyncio.Event(), threading.Event()
        loop, add = asyncio.get_running_loop(), gateway._store.add_many_spans

        async def slowly(spans: Any) -> Any:
            written = await add(spans)
            loop.call_soon_threadsafe(writing.set)
            await asyncio.to_thread(released.wait, 20)
            return written

        gateway._store.add_many_spans = slowly  # type: ignore[method-assign]
        url = attempt_url(gateway, rollout_id, attempt_id)
        async with aiohttp.ClientSession() as session:
            request = asyncio.ensure_future(session.post(url, json=BODY))
            await asyncio.wait_for(writing.wait(), 20)
            request.cancel()
            await asyncio.sleep(0.1)
            released.set()
            async with session.post(url, json=BODY) as answer:
                assert answer.status == 200, await answer.text()
        assert len(decode_turns(await store.query_spans(rollout_id, attempt_id))) == 2


async def test_unknown_rollout_is_404_and_ended_attempt_is_410() -> None:
    store = BridgeStore()
    with StoreService(store=store) as service, beside(RemoteStore(service.url), "one") as (gateway, _):
        async with httpx.AsyncClient(timeout=4) as http:
            assert (await http.post(attempt_url(gateway, "ro-none", "at-none"), json=BODY)).status_code == 404
            rollout_id, attempt_id = await begun(store)
            latest_attempt = gateway._store.get_latest_attempt

            async def ends_meanwhile(rollout_id: str) -> Any:
                attempt = await latest_attempt(rollout_id)
                gateway._end_rollout(rollout_id)
                return attempt

            gateway._store.get_latest_attempt = ends_meanwhile  # type: ignore[method-assign]
            url = attempt_url(gateway, rollout_id, attempt_id)
            assert (await http.post(url, json=BODY)).status_code == 410
            assert not gateway._attempts


async def test_close_waits_neither_for_stalled_upload_nor_for_cancelled_request() -> None:
    with serving("hello", token_s=0.2) as case:
        parts = urlsplit(case.llm.endpoint)
        stalled = socket.create_connection((parts.hostname, parts.port))
        head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{{"
        stalled.sendall(head.encode())
        await until(lambda: case.attempt.seen)
        await asyncio.wait_for(case.gateway.close(case.attempt), 2)
        stalled.close()
        attempt, served, _ = case.open("ro-2")
        async with aiohttp.ClientSession() as session:
            url = f"{served['main_llm'].endpoint}/chat/completions"
            request = asyncio.ensure_future(session.post(url, json=BODY))
            await until(lambda: attempt._pending)
            attempt.cancel_pending = lambda: None  # type: ignore[method-assign]  # pending responses take their time
            closing = asyncio.ensure_future(case.gateway.close(attempt))
            await asyncio.sleep(0.1)
            closing.cancel()
            await asyncio.wait({closing})
            request.cancel()
        assert ("ro-2", "at-1") not in case.gateway._attempts


def test_requests_in_flight_count_against_max_turns() -> None:
    with serving("hello", settings=GatewaySettings(max_turns=2)) as case:
        beyond, within = posted_at_once(case, chats_url(case), 5, answered=3)
        assert [[text(answer) for answer in answers] for answers in (beyond, within)] == [[""] * 3, ["hello"] * 2]
        assert len(case.turns) == 2


def test_empty_answers_reward_is_skipped_and_continued_answer_is_trained() -> None:
    def span_of(written: Any) -> Span:
        return Span.from_attributes(name=written.name, attributes=written.attributes, rollout_id="ro", attempt_id="at")

    with serving("one", "two", settings=GatewaySettings(max_turns=3)) as case:
        chat(case)
        assert (text(chat(case)), json.loads(case.summary[names.UNTRAINED_TURNS])) == ("two", [0])
        text(chat(case, {**BODY, "messages": [*HELLO, assistant("one"), user("And?")]}))
        assert json.loads(case.summary[names.UNTRAINED_TURNS]) == []
        empty = chat(case)
        assert text(empty) == ""
        case.close()
        link = make_link_attributes({names.RESPONSE_ID: empty.json()["id"]})
        spans = [*case.spans, emit_reward(0.5, propagate=False, attributes=link)]
        assert read_turn_rewards([*map(span_of, spans)]) == {}


def test_many_log_probs_are_serialized_off_the_event_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    write = ChatCompletions.answer

    def answer(self: Any, *args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return write(self, *args)

    monkeypatch.setattr(ChatCompletions, "answer", answer)
    with serving("x y " * 200, sampling={"max_new_tokens": 3000}) as case:
        body = {**BODY, "logprobs": True, "top_logprobs": 20}
        content = chat(case, body, timeout=30).json()["choices"][0]["logprobs"]["content"]
        assert text(chat(case))
        assert (len(content[0]["top_logprobs"]), len(content) * 20 > 2_000) == (20, True)
    assert [name == "agl-slime-gateway" for name in threads] == [False, True]


def test_a_key_that_is_no_text_is_401() -> None:
    with serving("hello") as case:
        parts = urlsplit(case.llm.endpoint)
        path = parts.path.replace(f"/k/{case.llm.api_key}", "")
        for key in (b"\xff\xfe", "schlüssel".encode(), b"x" * 5_000):
            with socket.create_connection((parts.hostname, parts.port)) as plain:
                head = f"POST {path}/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 2\r\n"
                plain.sendall(head.encode() + b"Authorization: Bearer " + key + b"\r\n\r\n{}")
                assert plain.recv(100).startswith(b"HTTP/1.1 401")


def test_unknown_paths_are_counted_in_bounded_memory() -> None:
    with serving("hello") as case, httpx.Client() as client:
        for n in range(60):
            assert client.get(f"{case.llm.endpoint}/nothing/{n}{'x' * 200}").status_code == 404
        assert text(chat(case)) == "hello"
        counts = gateway_counts(case)
        assert len(counts) < 30
        assert (counts["POST /chat/completions"], counts["refused/404"]) == (1, 60)


def test_an_unexpected_failure_is_logged_without_the_key(caplog: pytest.LogCaptureFixture) -> None:
    with serving("hello") as case, caplog.at_level(logging.DEBUG):
        case.gateway.access.tokenizer = None  # type: ignore[assignment]  # anything that breaks
        answer = chat(case)
        assert answer.status_code == 500
        assert "chat/completions failed" in caplog.text
        assert case.attempt.secret not in caplog.text + answer.text


async def test_no_error_says_a_password_or_a_token() -> None:
    with serving("hello") as case:
        llm = ProxyLLM(endpoint=f"{case.engine.url}/k/SECRET/v1", model="m")
        with pytest.raises(Exception, match="no gateway") as raised:
            await EngineAccess().engine(llm)
        assert "SECRET" not in str(raised.value)
    client = SGLangClient(base_url="http://user:SECRET@127.0.0.1:9", settings=QUICK)
    for refused in (client.probe(timeout_s=0.5), client.generate([1], SamplingParams())):
        with pytest.raises(EngineUnreachableError) as unreachable:
            await refused
        assert "SECRET" not in str(unreachable.value)
    await client.aclose()


def test_a_failure_in_the_middle_of_a_stream_is_an_event() -> None:
    def breaks(*_: Any, **__: Any) -> Any:
        raise TypeError("cannot be written")

    with serving("one two three", token_s=0.1) as case:
        case.attempt._note_answer = breaks  # type: ignore[method-assign]
        answer = chat(case, {**BODY, "stream": True})
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n")
        assert events_of(answer)[-1]["error"]["code"] == "gateway_error"
        run_blocking(case.gateway.close(case.attempt))
