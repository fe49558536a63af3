"""A count of the tokens that an engine has sampled, taken on the way to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from agl_slime.support.http import listening


class TokenCounter:
    """Passes requests to an engine, and counts the tokens of its answers."""

    def __init__(self) -> None:
        self.tokens = 0
        self.idle = asyncio.Event()
        """Set while no request is pending."""
        self.idle.set()
        self._requests = 0

    @asynccontextmanager
    async def in_front_of(self, url: str) -> AsyncIterator[str]:
        async with aiohttp.ClientSession() as session:

            async def forward(request: web.Request) -> web.Response:
                self._requests += 1
                self.idle.clear()
                try:
                    return await answer_to(request)
                finally:
                    self._requests -= 1
                    if not self._requests:
                        self.idle.set()

            async def answer_to(request: web.Request) -> web.Response:
                body = await request.read()
                kind = {"Content-Type": request.content_type} if body else {}
                async with session.request(request.method, url + request.path_qs, data=body, headers=kind) as answer:
                    # neither the probe for weight versions nor a request that scores tokens
                    uncounted = b'"input_ids":[0]' in body or b'"max_new_tokens":0,' in body
                    if request.path == "/generate" and answer.status == 200 and not uncounted:
                        self.tokens += (await answer.json())["meta_info"]["completion_tokens"]
                    return web.Response(
                        body=await answer.read(), status=answer.status, content_type=answer.content_type
                    )

            app = web.Application(client_max_size=64 << 20)
            app.router.add_route("*", "/{path:.*}", forward)
            async with listening(app, host="127.0.0.1", port=0, backlog=128, handler_cancellation=True) as address:
                yield address
