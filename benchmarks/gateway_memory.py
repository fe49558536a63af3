"""What rollouts hold at the gateway while they wait in a tool: memory by tokens and turns, CPU while they wait.

    python -m benchmarks.gateway_memory [--attempts 1000] [--waiting 2000] [--quick]

Each attempt is one conversation with tool calls, by chat completions, to ``--tokens`` tokens in ``--turns`` turns;
then nothing is asked for ``--seconds``, and all end. The process measured has the gateway, the store with the spans and
Agent Lightning 1.0's routes. ``--waiting`` attempts of a single short turn follow. The engine is a stub.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import orjson

from benchmarks.agl1_server import OURS, Server, markdown, saved, scripted, serving
from benchmarks.gateway_long import Protocol, Said, tools_of, words
from tests.harness.chat_templates import GROUPS_TOOLS

_AT_ONCE = 16
_CALL = 108  # tokens of a turn beside its observation: call, answer and marks
_SETTLE_S = 2.0


class Observed(Protocol):
    """Chats whose observations have so many words, nearly a token each."""

    def __init__(self, tokens: int, observation: int) -> None:
        super().__init__(tokens, stream=False)
        self._observation = words(observation)

    def results(self, message: dict[str, Any]) -> list[Any]:
        calls = message["tool_calls"]
        return [{"role": "tool", "tool_call_id": call["id"], "content": self._observation} for call in calls]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attempts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=30_000)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--waiting", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=60.0, help="without a request")
    parser.add_argument("--quick", action="store_true", help="a twentieth of both, for 10 s")
    options = parser.parse_args()
    if options.quick:
        options.attempts, options.waiting, options.seconds = options.attempts // 20, options.waiting // 20, 10.0
    with tempfile.TemporaryDirectory() as directory:
        texts = [orjson.dumps(tool).decode() for tool in tools_of(30)]
        model = saved(GROUPS_TOOLS, Path(directory), texts=texts * 3, vocab_size=380)
        print(asyncio.run(measured(model, options)), flush=True)
    return 0


async def measured(model: str, options: Namespace) -> str:
    first = options.tokens // 10
    grown = Observed(first, (options.tokens - first) // options.turns - _CALL)
    how = Namespace(answer_words=16, calls_tools=True, plain=True, python=None)
    columns = ["attempts", "turns", "tokens each", "MB held", "kB an attempt", "bytes a token", "CPU s a minute idle"]
    columns += ["MB after the end"]
    rows = []
    with scripted(model, how) as engine:
        for attempts, turns, protocol in (
            (options.attempts, options.turns, grown),
            (options.waiting, 1, Observed(1_000, 100)),
        ):
            async with serving(OURS, engine, how) as server:
                rows.append(await held(server, protocol, attempts, turns, options.seconds))
    return markdown("What waiting attempts hold", columns, rows)


async def held(server: Server, protocol: Protocol, attempts: int, turns: int, seconds: float) -> list[str]:
    begun = [await server.begun(protocol.path) for _ in range(attempts + 8)]
    tokens: list[int] = []

    async def ask(address: str) -> None:
        said, last = Said(protocol), 0
        for _ in range(turns):
            last = said.hear(await server.send("POST", address, said.body()))
        tokens.append(last)
        if len(tokens) % 50 == 0:
            print(f"… {len(tokens)} of {attempts}", file=sys.stderr, flush=True)

    async def some() -> None:
        while left:
            await ask(left.pop())

    for _, address in begun[:8]:  # templates are compiled, the stub makes its answers
        await ask(address)
    tokens.clear()
    before = server.resident()
    left = [address for _, address in begun[8:]]
    await asyncio.gather(*(some() for _ in range(_AT_ONCE)))
    await asyncio.sleep(_SETTLE_S)
    grown = server.resident() - before
    cpu, start = server.cpu(), time.perf_counter()
    await asyncio.sleep(seconds)
    idle = 60 * (server.cpu() - cpu) / (time.perf_counter() - start)
    for rollout, _ in begun:
        await server.ended(rollout)
    await server.delete([rollout for rollout, _ in begun])
    await asyncio.sleep(_SETTLE_S)
    after = server.resident() - before
    each = sum(tokens) / len(tokens)
    cells = [f"{attempts:,}", f"{turns}", f"{each:,.0f}", f"{grown / 1e6:,.0f}", f"{grown / 1e3 / attempts:,.0f}"]
    return [*cells, f"{grown / attempts / each:.1f}", f"{idle:.2f}", f"{after / 1e6:,.0f}"]


if __name__ == "__main__":
    sys.exit(main())
