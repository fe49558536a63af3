"""Clients that retry, hang up, and ask for too much at once: each answer goes to one of them, the engine stops sampling
for clients that are gone, and tokens that a client has received are trained."""

import asyncio
import json
import logging
import re
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import httpx
import pytest

from agl_slime.agent.access import EngineAccess
from agl_slime.engine.client.client import SGLangClient
from agl_slime.engine.client.generation import SamplingParams
from agl_slime.errors import EngineUnreachableError
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
from tests.gateway.protocols import CHATS, PROTOCOLS, assistant, body_of, events_of, user
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
    post,
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


async def test_attempt_that_ends_while_its_first_call_is_read_is_410() -> None:
    store = BridgeStore()
    with StoreService(store=store) as service, beside(RemoteStore(service.url), "one") as (gateway, _):
        async with httpx.AsyncClient(timeout=4) as http:
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
        await until(lambda: case.attempt.counts)
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
    """GETs apart: harnesses look for other servers' APIs with them. No path is the engine's."""
    routes = ("generate", "pause_generation", "update_weights_from_disk", "flush_cache", "abort_request")
    with serving("hello") as case, httpx.Client() as client:
        for n in range(60):
            assert client.get(f"{case.llm.endpoint}/nothing/{n}{'x' * 200}").status_code == 404
        for path in routes:
            assert client.post(f"{case.llm.endpoint.removesuffix('/v1')}/{path}", json={}).status_code == 404
        assert not case.engine.received
        assert text(chat(case)) == "hello"
        counts = gateway_counts(case)
        assert len(counts) < 30
        assert (counts["POST /chat/completions"], counts["unknown_gets"], counts["refused/404"]) == (1, 60, len(routes))


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


SAYS = "one two three four five six seven eight nine ten eleven twelve"
_TEXT = re.compile(r'"(?:content|text|delta)": ?"([^"]*)"')  # of an event, in every protocol
EVERY_PROTOCOL = pytest.mark.parametrize("path", PROTOCOLS)


@asynccontextmanager
async def client(case: Case, path: str, *, retry: int = 0, **fields: Any) -> AsyncIterator[asyncio.StreamReader]:
    """A request that was sent; the connection is closed at the end."""
    url = urlsplit(case.llm.endpoint)
    body = json.dumps(body_of(path, HELLO, **fields)).encode()
    head = f"POST {url.path}/{path} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Length: {len(body)}\r\n"
    head += f"x-stainless-retry-count: {retry}\r\n\r\n"
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        writer.write(head.encode() + body)
        yield reader
    finally:
        writer.close()


def tasks(case: Case) -> set[asyncio.Task[Any]]:
    """The tasks on the gateway's loop."""
    assert case.gateway._thread is not None
    assert case.gateway._thread.loop is not None
    return asyncio.all_tasks(case.gateway._thread.loop)


async def ended(case: Case, old_tasks: set[asyncio.Task[Any]], aborts: int = 1) -> None:
    """The engine has received aborts long before it would have been done, and the gateway has no tasks of theirs."""
    await until(lambda: case.engine.calls["/abort_request"] >= aborts and not case.engine.running)
    await until(lambda: not tasks(case) - old_tasks)
    assert case.engine.calls["/abort_request"] == aborts
    assert not case.attempt._pending
    assert not case.attempt.running


def answered_whole(case: Case, path: str) -> None:
    """The same question is answered to its end."""
    case.engine.token_s = case.engine.latency_s = 0.0
    post(case, path, **body_of(path, HELLO))
    assert case.turns[-1].finish_reason == "stop"
    trained_once(case.turns, case.segments)


@EVERY_PROTOCOL
@pytest.mark.parametrize("stream", [False, True])
async def test_of_a_client_that_goes_before_its_answer_nothing_is_left(path: str, stream: bool) -> None:
    answers = 3 if path == "chat/completions" else 1
    with serving(SAYS, SAYS, latency_s=60.0) as case:
        old_tasks = tasks(case)
        async with client(case, path, stream=stream, **({"n": 3} if answers == 3 else {})):
            await until(lambda: case.engine.running == answers)
        await ended(case, old_tasks, aborts=answers)
        assert not case.spans
        answered_whole(case, path)
        assert len(case.turns) == 1


@EVERY_PROTOCOL
async def test_tokens_streamed_before_client_disconnect_are_recorded_as_a_turn(path: str) -> None:
    with serving(SAYS, SAYS, token_s=0.1) as case:
        old_tasks, received = tasks(case), b""
        async with client(case, path, stream=True) as reader:
            while len(text := "".join(_TEXT.findall(received.decode()))) < 5:
                received += await asyncio.wait_for(reader.read(2**16), 10)
        await ended(case, old_tasks)
        await until(lambda: case.spans)
        [turn] = case.turns
        assert (turn.finish_reason, turn.untrained) == ("abort", "")
        assert turn.text.startswith(text)
        assert "twelve" not in turn.text
        assert case.tokenizer.decode(turn.response_ids) == turn.text
        assert turn.log_probs is not None
        assert len(turn.log_probs) == len(turn.response_ids)
        continued = 0
        if path in CHATS:  # the client continues from a part of the text that it has received, or from all of it
            case.engine.token_s = 0.0
            for received, fork in ((text[:-2], ForkReason.BRANCH), (turn.text, None)):
                post(case, path, **body_of(path, [*HELLO, assistant(received.strip()), user("And?")]))
                assert case.turns[-1].fork is fork
                continued += 1
            assert json.loads(case.summary.get(names.UNTRAINED_TURNS, "[]")) == []
        answered_whole(case, path)
        assert len(case.turns) == 2 + continued


@pytest.mark.parametrize("stays", [True, False])
async def test_answer_is_sampled_only_as_long_as_a_client_waits_for_it(stays: bool) -> None:
    """A client that gave up waiting asks for the same again, and its first connection is closed."""
    path = "chat/completions"
    with serving(SAYS, latency_s=1.0 if stays else 60.0) as case:
        old_tasks = tasks(case)
        first, second = client(case, path), client(case, path, retry=1)
        await first.__aenter__()
        await until(lambda: case.engine.running)
        reader = await second.__aenter__()
        await until(lambda: case.attempt.recent.responses[0].clients == 2)
        await first.__aexit__(None, None, None)
        await until(lambda: case.attempt.recent.responses[0].clients == 1)
        if stays:
            assert b"200 OK" in await asyncio.wait_for(reader.readline(), 10)
        await second.__aexit__(None, None, None)
        await ended(case, old_tasks, aborts=0 if stays else 1)
        assert len(case.turns) == case.engine.calls["/generate"] * stays
