"""Clients that close their connection before they are answered, in every protocol: the engine stops sampling for them,
none of their tasks goes on, and the delivered part of a stream is a turn."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.gateway.protocols import PROTOCOLS, body_of
from tests.harness.gateway import HELLO, Case, post, serving, trained_once
from tests.harness.waiting import until

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
    await until(lambda: case.engine.calls["/abort_request"] >= aborts and not case.engine.running, 3)
    await until(lambda: not tasks(case) - old_tasks, 3)
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
    with serving(SAYS, SAYS, latency_s=60.0) as case:
        old_tasks = tasks(case)
        async with client(case, path, stream=stream):
            await until(lambda: case.engine.running)
        await ended(case, old_tasks)
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
        answered_whole(case, path)
        assert len(case.turns) == 2


async def test_each_of_several_answers_is_aborted() -> None:
    with serving(SAYS, latency_s=60.0) as case:
        old_tasks = tasks(case)
        async with client(case, "chat/completions", n=3):
            await until(lambda: case.engine.running == 3)
        await ended(case, old_tasks, aborts=3)
        assert not case.spans


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
