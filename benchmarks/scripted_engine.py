"""A server that answers as SGLang's ``/generate`` does, always the same, after a given time; it costs as little as a
Python server can. Chat completions are answered in OpenAI's form, whatever their address begins with.

Prints its URL and serves until it is terminated. Connections are kept alive; a client sends its next request on one
when it has the answer. With ``--slots N`` it answers N requests at a time and queues the others, as a full engine does.
A pause stops the clock of all requests; an update takes ``--update`` seconds, and later answers have its weight
version.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import time
from collections import deque
from collections.abc import Callable
from functools import cache, partial


def prompt_length(body: bytes) -> int:
    """The number of ids in the ``input_ids`` of a request, which the client compares with the answer's."""
    start = body.find(b'"input_ids"')
    return body.count(b",", start, body.find(b"]", start)) + 1


@cache
def answer(prompt_tokens: int, tokens: int, version: str) -> bytes:
    rng = random.Random(0)
    pairs = [[-rng.random(), rng.randrange(10, 250), None] for _ in range(tokens)]
    body = {
        "text": "x" * tokens,
        "output_ids": [pair[1] for pair in pairs],
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "stop", "matched": None},
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "weight_version": version,
            "output_token_logprobs": pairs,
        },
    }
    return http_answer(json.dumps(body).encode())


@cache
def completion(tokens: int) -> bytes:
    message = {"role": "assistant", "content": "x" * tokens}
    body = {
        "id": "chatcmpl-r",
        "object": "chat.completion",
        "created": 0,
        "model": "scripted",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 32, "completion_tokens": tokens, "total_tokens": 32 + tokens},
    }
    return http_answer(json.dumps(body).encode())


def http_answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


class Desk:
    """The requests of all connections, running and queued."""

    def __init__(self, *, latency_s: float, spread_s: float, tokens: int, slots: int | None, update_s: float) -> None:
        self._latency_s, self._spread_s, self._tokens = latency_s, spread_s, tokens
        self._free, self._update_s = slots, update_s
        self._waiting: deque[Callable[[], None]] = deque()
        self._running: dict[Callable[[], None], tuple[asyncio.TimerHandle, float]] = {}
        self._held: list[tuple[Callable[[], None], float]] | None = None
        self._version = "0"
        self._loop = asyncio.get_running_loop()

    def ask(self, path: bytes, body: bytes, send: Callable[[bytes], None]) -> None:
        if (chat := path.endswith(b"/chat/completions")) or path == b"/generate":
            self._waiting.append(partial(self._answer, send, 0 if chat else prompt_length(body)))
            self._start()
        elif path == b"/update_weights_from_disk":
            self._version = str(json.loads(body)["weight_version"])
            self._loop.call_later(self._update_s, send, self._info())
        elif path == b"/workers":  # it is no router
            send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        else:
            if path == b"/pause_generation" and self._held is None:
                for timer, _ in self._running.values():
                    timer.cancel()
                self._held = [(one, due - time.monotonic()) for one, (_, due) in self._running.items()]
                self._running.clear()
            elif path == b"/continue_generation" and self._held is not None:
                held, self._held = self._held, None
                for one, left_s in held:
                    self._run(one, left_s)
                self._start()
            send(self._info())

    def _start(self) -> None:
        while self._held is None and self._waiting and (self._free is None or self._free > 0):
            if self._free is not None:
                self._free -= 1
            self._run(self._waiting.popleft(), self._latency_s + self._spread_s * (random.random() - 0.5))

    def _run(self, one: Callable[[], None], seconds: float) -> None:
        self._running[one] = self._loop.call_later(seconds, self._done, one), time.monotonic() + seconds

    def _done(self, one: Callable[[], None]) -> None:
        del self._running[one]
        if self._free is not None:
            self._free += 1
        one()
        self._start()

    def _answer(self, send: Callable[[bytes], None], prompt_tokens: int) -> None:
        """``prompt_tokens`` are 0 for a chat completion."""
        send(answer(prompt_tokens, self._tokens, self._version) if prompt_tokens else completion(self._tokens))

    def _info(self) -> bytes:
        info = {"model_path": "scripted", "weight_version": self._version, "is_generation": True}
        info |= {"enable_memory_saver": False, "tp_size": 1, "dp_size": 1}  # what slime asks of an engine that runs
        return http_answer(json.dumps({**info, "success": True}).encode())


class Engine(asyncio.Protocol):
    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            if head.startswith(b"pri * http/2"):  # a router asks whether this speaks it
                self._buffer = b""
                assert self._transport is not None
                self._transport.close()
                return
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            path, body = head.split(b" ", 2)[1], self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            self._desk.ask(path, body, self._send)

    def _send(self, reply: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(reply)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latency", type=float, default=2.0, help="seconds")
    parser.add_argument(
        "--spread",
        type=float,
        default=0.0,
        help="seconds between the quickest and the slowest answer; the mean is --latency",
    )
    parser.add_argument("--tokens", type=int, default=32, help="per answer")
    parser.add_argument("--slots", type=int, help="requests at a time; any number by default")
    parser.add_argument("--update", type=float, default=0.0, help="seconds that new weights take")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.freeze()
    loop = asyncio.get_running_loop()
    desk = Desk(
        latency_s=options.latency,
        spread_s=options.spread,
        tokens=options.tokens,
        slots=options.slots,
        update_s=options.update,
    )
    server = await loop.create_server(lambda: Engine(desk), "127.0.0.1", 0, backlog=8192)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
