"""Clients that close their connection before they are answered, in every protocol: the engine stops sampling for them,
nothing of theirs runs on, and what was delivered of a stream is a turn."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.harness.gateway import Case, serving, trained_once
from tests.harness.waiting import until

HELLO: list[Any] = [{"role": "user", "content": "Hello?"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HELLO},
    "completions": {"prompt": "Hello?", "max_tokens": 64},
    "responses": {"input": "Hello?"},
    "messages": {"messages": HELLO, "max_tokens": 64},
}
SAYS = "one two three four five six seven eight nine ten eleven twelve"
_SAID = re.compile(r'"(?:content|text|delta)": ?"([^"]*)"')  # of an event, in all of them
every_protocol = pytest.mark.parametrize("path", BODIES)


@asynccontextmanager
async def client(case: Case, path: str, *, retry: int = 0, **more: Any) -> AsyncIterator[asyncio.StreamReader]:
    """A request that was sent; the connection is closed at the end."""
    at = urlsplit(case.llm.endpoint)
    body = json.dumps({**BODIES[path], "model": "m", **more}).encode()
    head = f"POST {at.path}/{path} HTTP/1.1\r\nHost: {at.netloc}\r\nContent-Length: {len(body)}\r\n"
    head += f"x-stainless-retry-count: {retry}\r\n\r\n"
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    try:
        writer.write(head.encode() + body)
        yield reader
    finally:
        writer.close()


def tasks(case: Case) -> set[asyncio.Task[Any]]:
    """What runs on the gateway's loop."""
    assert case.gateway._thread is not None
    assert case.gateway._thread.loop is not None
    return asyncio.all_tasks(case.gateway._thread.loop)


async def ended(case: Case, before: set[asyncio.Task[Any]], aborts: int = 1) -> None:
    """The engine was told, long before it would have been done, and nothing is left at the gateway."""
    await asyncio.wait_for(until(lambda: case.engine.calls["/abort_request"] >= aborts and not case.engine.running), 3)
    await asyncio.wait_for(until(lambda: not tasks(case) - before), 3)
    assert case.engine.calls["/abort_request"] == aborts
    assert not case.attempt._pending
    assert not case.attempt.running


def goes_on(case: Case, path: str) -> None:
    """The same question is answered whole."""
    case.engine.token_s = case.engine.latency_s = 0.0
    answer = httpx.post(f"{case.llm.endpoint}/{path}", json={**BODIES[path], "model": "m"})
    assert answer.status_code == 200, answer.text
    assert case.turns[-1].finish_reason == "stop"
    trained_once(case.turns, case.segments)


@every_protocol
@pytest.mark.parametrize("stream", [False, True])
async def test_of_a_client_that_goes_before_its_answer_nothing_is_left(path: str, stream: bool) -> None:
    with serving(SAYS, SAYS, latency_s=60.0) as case:
        before = tasks(case)
        async with client(case, path, stream=stream):
            await until(lambda: case.engine.running)
        await ended(case, before)
        assert not case.spans
        goes_on(case, path)
        assert len(case.turns) == 1


@every_protocol
async def test_tokens_streamed_before_client_disconnect_are_recorded_as_a_turn(path: str) -> None:
    with serving(SAYS, SAYS, token_s=0.1) as case:
        before, came = tasks(case), b""
        async with client(case, path, stream=True) as reader:
            while len(said := "".join(_SAID.findall(came.decode()))) < 5:
                came += await asyncio.wait_for(reader.read(2**16), 10)
        await ended(case, before)
        await until(lambda: case.spans)
        [turn] = case.turns
        assert (turn.finish_reason, turn.untrained) == ("abort", "")
        assert turn.text.startswith(said)
        assert "twelve" not in turn.text
        assert case.tokenizer.decode(turn.response_ids) == turn.text
        assert turn.log_probs is not None
        assert len(turn.log_probs) == len(turn.response_ids)
        goes_on(case, path)
        assert len(case.turns) == 2


async def test_each_of_several_answers_is_aborted() -> None:
    with serving(SAYS, latency_s=60.0) as case:
        before = tasks(case)
        async with client(case, "chat/completions", n=3):
            await until(lambda: case.engine.running == 3)
        await ended(case, before, aborts=3)
        assert not case.spans


@pytest.mark.parametrize("stays", [True, False])
async def test_answer_is_sampled_only_as_long_as_a_client_waits_for_it(stays: bool) -> None:
    """A client that gave up waiting asks for the same again, and its first connection is closed."""
    path = "chat/completions"
    with serving(SAYS, latency_s=1.0 if stays else 60.0) as case:
        before = tasks(case)
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
        await ended(case, before, aborts=0 if stays else 1)
        assert len(case.turns) == case.engine.calls["/generate"] * stays
