"""A scripted model behind an OpenAI-compatible address, and verifiers' episodes with it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Script = Callable[[dict[str, Any]], str | dict[str, Any]]


@contextlib.asynccontextmanager
async def serving(script: Script) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a model that answers each chat request by `script`, and the requests that it received."""
    requests: list[dict[str, Any]] = []

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        requests.append(body)
        reply = script(body)
        message = reply if isinstance(reply, dict) else {"content": reply}
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        base = {"id": f"chatcmpl-{len(requests)}", "created": 0, "model": body.get("model", "scripted")}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
            return web.json_response({**base, "object": "chat.completion", "choices": [choice], "usage": usage})
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or [])]
        delta = {"role": "assistant", "content": message.get("content"), **({"tool_calls": calls} if calls else {})}
        for content, reason in ((delta, None), ({}, finish)):
            choices = [{"index": 0, "delta": content, "finish_reason": reason}]
            chunk = {**base, "object": "chat.completion.chunk", "choices": choices}
            await stream.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        last = {**base, "object": "chat.completion.chunk", "choices": [], "usage": usage}
        await stream.write(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n")
        return stream

    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_post("/v1/chat/completions", chat)
    async with TestServer(app) as server:
        yield str(server.make_url("/v1")), requests


def environment(block: Any) -> Any:
    """The environment of verifiers that a configuration describes."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    return load_environment(resolve_env_config(block))


def client(address: str) -> Any:
    from verifiers.v1.clients import EvalClientConfig

    os.environ["SCRIPTED_KEY"] = "none"
    return EvalClientConfig(base_url=address, api_key_var="SCRIPTED_KEY")


async def episode_of(env: Any, task: Any, address: str) -> Any:
    """An episode of verifiers with the model at ``address``."""
    from verifiers.v1.clients import ModelContext

    return await env.run_episode(task, ModelContext(model="scripted", client=client(address)))


def messages_of(episode: Any) -> list[str]:
    """The error messages of an episode and of its traces."""
    return [e.message for e in [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]]


def scores_of(trace: Any) -> dict[str, float]:
    return {name: reward.score for name, reward in trace.rewards.items() if reward is not None}


def print_result(function: Callable[..., Any], *arguments: Any) -> None:
    """The result as JSON on standard output, which libraries print to as well."""
    output, sys.stdout = sys.stdout, sys.stderr
    result = function(*arguments)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    print(json.dumps(result, default=str), file=output)
