"""A scripted model behind an OpenAI-compatible address."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiohttp import web

Script = Callable[[dict[str, Any]], str | dict[str, Any]]


@contextlib.asynccontextmanager
async def serving(script: Script) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """The address of a model that answers each chat request as `script` says, and the requests it was sent."""
    asked: list[dict[str, Any]] = []

    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked.append(body)
        said = script(body)
        message = said if isinstance(said, dict) else {"content": said}
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        base = {"id": f"chatcmpl-{len(asked)}", "created": 0, "model": body.get("model", "scripted")}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        if not body.get("stream"):
            choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
            return web.json_response({**base, "object": "chat.completion", "choices": [choice], "usage": usage})
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await stream.prepare(request)
        calls = [{"index": i, **call} for i, call in enumerate(message.get("tool_calls") or [])]
        delta = {"role": "assistant", "content": message.get("content"), **({"tool_calls": calls} if calls else {})}
        for part, why in ((delta, None), ({}, finish)):
            choices = [{"index": 0, "delta": part, "finish_reason": why}]
            chunk = {**base, "object": "chat.completion.chunk", "choices": choices}
            await stream.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        last = {**base, "object": "chat.completion.chunk", "choices": [], "usage": usage}
        await stream.write(b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n")
        return stream

    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", asked
    finally:
        await runner.cleanup()
