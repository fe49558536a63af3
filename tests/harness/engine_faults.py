"""Faults of a ``ScriptedEngine``, and its small parts."""

from __future__ import annotations

import asyncio
import json
import zlib
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aiohttp import web

if TYPE_CHECKING:
    from tests.harness.scripted_engine import ScriptedEngine

# one piece of text per id, some of several letters, so that stop strings begin and end inside tokens
PIECES = ("a", "b", "c", "ab", "bc", "ca", "aa", "cb", "é", " ", "\n", "abc", "</", "x>", "1", "2")


# the response that the engine would have sent
Answer = Callable[[], Awaitable[web.StreamResponse]]


# -- faults ----------------------------------------------------------------------------------------------------------


class Fault:
    """One misbehaviour; a subclass overrides ``apply``, or the generation itself reads it (``GenerationFault``)."""

    async def apply(self, engine: ScriptedEngine, request: web.Request, answer: Answer) -> web.StreamResponse:
        raise NotImplementedError


@dataclass(frozen=True)
class Status(Fault):
    """An error status, in SGLang's form, or a redirect to /health; ``retry_after`` sets the header of that name."""

    status: int
    message: str = "scripted failure"
    retry_after: str | None = None

    async def apply(self, engine: ScriptedEngine, request: web.Request, answer: Answer) -> web.StreamResponse:
        headers = {"Retry-After": self.retry_after} if self.retry_after is not None else {}
        if 300 <= self.status < 400:
            headers["Location"] = "/health"
        return web.json_response({"error": {"message": self.message}}, status=self.status, headers=headers)


@dataclass(frozen=True)
class Body(Fault):
    """Status 200 with another body than SGLang's."""

    text: str
    content_type: str = "application/json"

    async def apply(self, engine: ScriptedEngine, request: web.Request, answer: Answer) -> web.StreamResponse:
        return web.Response(text=self.text, content_type=self.content_type)


GARBAGE_JSON = Body('{"text": "half an answ')
HTML_PAGE = Body("<html><body><h1>It works!</h1></body></html>", content_type="text/html")


@dataclass(frozen=True)
class Edited(Fault):
    """The answer after ``change(answer, meta_info)``."""

    change: Callable[[dict[str, Any], dict[str, Any]], Any]

    async def apply(self, engine: ScriptedEngine, request: web.Request, answer: Answer) -> web.StreamResponse:
        body = json.loads(body_of(await answer()))
        self.change(body, body["meta_info"])
        return web.json_response(body)


UNCHANGED = Edited(lambda body, meta: None)


@dataclass(frozen=True)
class Reset(Fault):
    """A TCP reset: at once, or with ``in_body`` after half of the answer."""

    in_body: bool = False

    async def apply(self, engine: ScriptedEngine, request: web.Request, answer: Answer) -> web.StreamResponse:
        assert request.transport is not None
        if not self.in_body:
            request.transport.abort()
            return web.Response()
        body = body_of(await answer())
        half = await announce(request, body)
        await half.write(body[: len(body) // 2])
        request.transport.abort()
        return half


@dataclass(frozen=True)
class Stall(Fault):
    """No answer as long as the engine lives."""

    async def apply(self, engine: ScriptedEngine, request: web.Request, answer: Answer) -> web.StreamResponse:
        await engine.closing.wait()
        return web.Response(status=503)


@dataclass(frozen=True)
class Drip(Fault):
    """The right answer, one byte each ``every_s`` seconds: the idle timeout never strikes, the total one must."""

    every_s: float = 0.02

    async def apply(self, engine: ScriptedEngine, request: web.Request, answer: Answer) -> web.StreamResponse:
        body = body_of(await answer())
        slow = await announce(request, body)
        for i in range(len(body)):
            try:
                await slow.write(body[i : i + 1])
            except ConnectionError:
                break  # the client has given up
            if await wait_for(engine.closing, self.every_s):
                break
        return slow


@dataclass(frozen=True)
class GenerationFault(Fault):
    """A fault inside a generation, after ``n_tokens``; only for ``/generate``."""

    n_tokens: int


class Abort(GenerationFault):
    """The engine aborts the generation; with 0 tokens it was "aborted in the queue"."""


@dataclass(frozen=True)
class NewVersion(GenerationFault):
    """The next token, and every later request, is sampled with the weights of ``version``."""

    version: str


# -- parts of the engine ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Received:
    path: str
    payload: dict[str, Any]
    headers: dict[str, str]


@dataclass
class Running:
    """A request between its arrival and its answer."""

    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    on_token: Callable[[dict[str, Any]], Awaitable[None]] | None = None


async def wait_for(event: asyncio.Event, seconds: float) -> bool:
    """Sleep until ``event``, for at most ``seconds``; whether it was set."""
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True


def answering(answer_ids: Sequence[int], *, end_id: int) -> Callable[[Sequence[int]], int]:
    """A ``next_id`` that answers any prompt with ``answer_ids`` and then ``end_id``, and resumes a partial answer.

    The longest beginning of the answer with which the ids so far end counts as sampled, so the answer must not begin
    as the prompt ends.
    """
    answer = (*answer_ids, end_id)

    def next_id(ids: Sequence[int]) -> int:
        done = next((n for n in range(min(len(answer) - 1, len(ids)), 0, -1) if tuple(ids[-n:]) == answer[:n]), 0)
        return answer[done]

    return next_id


def digest(ids: Sequence[int]) -> int:
    # the last 64 ids are enough to tell prompts apart, and keep a step's cost flat
    return zlib.crc32(array("q", ids[-64:]).tobytes()) >> 7


def log_prob_of(ids: Sequence[int]) -> float:
    return -((digest(ids) % 1000) + 1) / 256.0  # exact in float32 and in JSON


def decode_pieces(ids: Sequence[int]) -> str:
    return "".join(PIECES[token % len(PIECES)] for token in ids)


def answer_of(
    rid: str, text: str, ids: list[int], log_probs: list[float], finish: dict[str, Any] | None, counts: dict[str, Any]
) -> dict[str, Any]:
    pairs = [[log_prob, token, None] for log_prob, token in zip(log_probs, ids, strict=True)]
    return {
        "text": text,
        "output_ids": ids,
        "meta_info": {"id": rid, "finish_reason": finish, "output_token_logprobs": pairs, **counts},
    }


async def announce(request: web.Request, body: bytes) -> web.StreamResponse:
    """A response that announces ``body`` and has sent none of it."""
    response = web.StreamResponse(headers={"Content-Length": str(len(body)), "Content-Type": "application/json"})
    await response.prepare(request)
    return response


def body_of(response: web.StreamResponse) -> bytes:
    assert isinstance(response, web.Response)
    assert isinstance(response.body, bytes)
    return response.body
