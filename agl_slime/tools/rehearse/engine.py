"""An engine without a model: SGLang's endpoints that slime and our agents use, answered with random tokens at given
speeds (``forecast.Decoder``)."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from itertools import count
from pathlib import Path
from typing import Any

from aiohttp import web

from agl_slime.support.http import listening, read_body, stop_signal
from agl_slime.tools.rehearse.forecast import Decoder, Shape, Speeds

REQUEST = "AGL_SLIME_REHEARSAL"
"""The environment variable with the path of the live rehearsal's request."""
_VOCABULARY = range(32, 120)  # plain characters of the stand-in tokenizer


class Engine:
    """Requests that decode in real time. ``generate`` answers one; ``abort`` ends all with their tokens so far."""

    def __init__(self, speeds: Speeds, shape: Shape, *, seed: int = 0) -> None:
        self._speeds, self._shape = speeds, shape
        self._decoder, self._rng, self._numbers = Decoder(speeds, shape), random.Random(seed), count()
        self._answers: dict[int, asyncio.Future[int]] = {}
        self._tokens: dict[int, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._began = time.monotonic()
        self.version = "0"

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """SGLang's answer to ``/generate``."""
        limit = (body.get("sampling_params") or {}).get("max_new_tokens") or self._shape.max_tokens
        length = self._shape.length(self._rng)
        number = next(self._numbers)
        self._tokens[number] = min(length, limit)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._decoder.waiting.append((number, self._tokens[number]))
        self._wake()
        tokens = await answer
        reason = "abort" if tokens < self._tokens.pop(number) else "length" if length > limit else "stop"
        ids = [self._rng.choice(_VOCABULARY) for _ in range(tokens)]
        meta = {"id": str(number), "finish_reason": {"type": reason}, "weight_version": self.version}
        meta |= {"prompt_tokens": len(body.get("input_ids") or ()), "completion_tokens": tokens, "cached_tokens": 0}
        meta["output_token_logprobs"] = [[-1.0, token, None] for token in ids]
        return {"text": "".join(map(chr, ids)), "output_ids": ids, "meta_info": meta}

    def abort(self) -> None:
        """End all requests, with the tokens that they have."""
        self._decoder.move(self._now)
        for number, answer in [*self._answers.items()]:
            unsampled = self._decoder.drop({number})
            self._finish(number, max(0, self._tokens[number] - max(unsampled, 1)), answer)
        self._wake()

    def pause(self) -> None:
        self.abort()
        self._decoder.stopped = True

    async def update(self, body: dict[str, Any]) -> None:
        """Take the time of a weight update, with its version."""
        await asyncio.sleep(self._speeds.sync_s)
        self.version = str(body.get("weight_version") or self.version)

    def resume(self) -> None:
        self._decoder.resume(self._now, prefill=False)
        self._wake()

    @property
    def _now(self) -> float:
        return time.monotonic() - self._began

    def _wake(self) -> None:
        """Answer finished requests, and set the timer for the next one."""
        decoder = self._decoder
        decoder.move(self._now)
        while decoder.next_end() <= self._now:
            number = decoder.pop()
            self._finish(number, self._tokens[number], self._answers[number])
            decoder.move(self._now)
        if self._timer is not None:
            self._timer.cancel()
        if (next_end := decoder.next_end()) < math.inf:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, next_end - self._now), self._wake)

    def _finish(self, number: int, tokens: int, answer: asyncio.Future[int]) -> None:
        del self._answers[number]
        if not answer.done():
            answer.set_result(tokens)


def make_app(engine: Engine) -> web.Application:
    """The server of ``engine``."""
    calls = {"/pause_generation": engine.pause, "/continue_generation": engine.resume, "/abort_request": engine.abort}

    async def handle(request: web.Request) -> web.Response:
        body = await read_body(request, lambda raw: json.loads(raw or b"{}"))
        if (path := request.path) == "/generate":
            return web.json_response(await engine.generate(body))
        if path in calls:
            calls[path]()
        elif path.startswith("/update_weights_from"):
            await engine.update(body)
        elif path == "/workers":  # it is no router
            return web.json_response({}, status=404)
        info = {"success": True, "weight_version": engine.version, "model_path": "rehearsal", "is_generation": True}
        return web.json_response({**info, "enable_memory_saver": False, "tp_size": 1, "dp_size": 1})

    app = web.Application(client_max_size=2**28)
    app.router.add_route("*", "/{path:.*}", handle)
    return app


def serve(host: str, port: int) -> None:
    """Serve the engine of the live rehearsal that the environment names, until the process ends."""
    request = json.loads(Path(os.environ[REQUEST]).read_text())

    async def run() -> None:
        app = make_app(Engine(Speeds(**request["speeds"]), Shape(**request["shape"]), seed=port))
        async with listening(app, host=host, port=port, backlog=1024):
            await stop_signal().wait()

    asyncio.run(run())
