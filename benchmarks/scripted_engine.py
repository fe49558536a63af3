"""A server that answers as SGLang's ``/generate`` does, always the same, after a given time; it costs as little as a
Python server can. Chat completions are answered in OpenAI's form, whatever their address begins with.

Prints its URL and serves until it is terminated. Connections are kept alive; a client sends its next request on one
when it has the answer.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource


def answer(tokens: int) -> bytes:
    rng = random.Random(0)
    pairs = [[-rng.random(), rng.randrange(10, 250), None] for _ in range(tokens)]
    body = {
        "text": "x" * tokens,
        "output_ids": [pair[1] for pair in pairs],
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": "stop", "matched": None},
            "prompt_tokens": 32,
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "weight_version": "0",
            "output_token_logprobs": pairs,
        },
    }
    return _response(json.dumps(body).encode())


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
    return _response(json.dumps(body).encode())


def _response(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) + body


_INFO = _response(
    json.dumps(
        {"model_path": "scripted", "weight_version": "0", "is_generation": True, "urls": [], "workers": []}
    ).encode()
)


class Engine(asyncio.Protocol):
    def __init__(self, *, latency_s: float, spread_s: float, reply: bytes, chat: bytes) -> None:
        self._latency_s = latency_s
        self._spread_s = spread_s
        self._reply = reply
        self._chat = chat
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            path = head.split(b" ", 2)[1]
            self._buffer = self._buffer[end + 4 + length :]
            chat = path.endswith(b"/chat/completions")
            if chat or path == b"/generate":
                after = self._latency_s + self._spread_s * (random.random() - 0.5)
                self._loop.call_later(after, self._send, self._chat if chat else self._reply)
            else:
                self._send(_INFO)

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
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.freeze()
    replies = {"reply": answer(options.tokens), "chat": completion(options.tokens)}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Engine(latency_s=options.latency, spread_s=options.spread, **replies), "127.0.0.1", 0, backlog=8192
    )
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
