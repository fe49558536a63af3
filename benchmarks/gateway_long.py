"""What a call through the gateway costs when its prompt is long: calls per second, CPU, p50 and p99.

    python -m benchmarks.gateway_long [--tokens 1000 22000] [--at-once 16] [--protocols chat messages]

Agents with tool schemas (30, fewer for the shortest prompts) whose each answer calls a tool and gets 400 words of
observation; the engine is a stub that answers at once. Server, stub and clients are three processes. Beside the gateway
of a run and the recorder (``agl-slime record``) stand the same clients at the stub itself (*bare*: its chat
completions) and, where ``AGL_CONTROLLER_PYTHON`` names a Python that has it, Agent Lightning 1.0's ``agl-server``; with
``--litellm PYTHON`` LiteLLM's proxy, which Agent Lightning 0.3 ships as its own; with ``--router PYTHON`` SGLang's
router, which records nothing; with ``--in-process`` the gateway in the clients' own process, as in-process agents have
it: its CPU is among its client's. They take turns, so that what else the machine does meets all.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, product
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmarks.agl1_server import OURS, THEIRS, Engine, Server, markdown, saved, scripted, serving, started, wait_for
from benchmarks.common import percentile
from benchmarks.multi_turn import WORDS
from tests.harness.chat_templates import GROUPS_TOOLS

BARE, IN_PROCESS, LITELLM, RECORDER, ROUTER = "bare", "in process", "litellm", "recorder", "sglang-router"
_OBSERVATION, _ANSWER = 400, 16
_HOST = "127.0.0.1"
_NUMBERS = count()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[1_000, 4_000, 16_000, 32_000, 64_000], help="at first"
    )
    parser.add_argument("--at-once", type=int, nargs="*", default=[16, 64, 256], help="rollouts")
    parser.add_argument("--protocols", nargs="*", default=[*PROTOCOLS], choices=[*PROTOCOLS])
    parser.add_argument("--whole", action="store_true", help="answers that are not streamed only")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--calls", type=int, default=640, help="at least so many per measurement")
    parser.add_argument("--quick", action="store_true", help="two sizes of chat, 16 at once, not streamed")
    parser.add_argument("--without", nargs="*", default=[], choices=[BARE, THEIRS, RECORDER, OURS])
    parser.add_argument("--python", default=os.environ.get("AGL_CONTROLLER_PYTHON"), help="has agentlightning 1.x")
    parser.add_argument("--litellm", help="a Python that has litellm[proxy]")
    parser.add_argument("--router", help="a Python that has sglang-router")
    parser.add_argument("--in-process", action="store_true", help="also the gateway in the clients' process")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.at_once, options.calls = [2_000, 22_000], [16], 256
        options.protocols, options.whole = ["chat"], True
    options.kinds = [kind for kind in (OURS, RECORDER, BARE, THEIRS) if kind not in options.without]
    options.kinds += [LITELLM] if options.litellm else []
    options.kinds += [ROUTER] if options.router else []
    options.kinds += [IN_PROCESS] if options.in_process else []
    if not options.python and THEIRS in options.kinds:
        options.kinds.remove(THEIRS)
    with tempfile.TemporaryDirectory() as directory:
        texts = [orjson.dumps(tool).decode() for tool in tools_of(30)]
        model = saved(GROUPS_TOOLS, Path(directory), texts=texts * 3, vocab_size=380)
        print(asyncio.run(measured(model, options)), flush=True)
    return 0


@dataclass
class Found:
    seconds: float = 0.0
    cpu: float = 0.0
    own: float = 0.0
    tokens: int = 0
    taken: list[float] = field(default_factory=list)


async def measured(model: str, options: Namespace) -> str:
    columns = ["protocol", "tokens of prompts", "at once", "", "calls/s", "of bare", "CPU ms a call", "its client's"]
    columns += ["p50 ms", "p99 ms"]
    rows = []
    how = Namespace(answer_words=_ANSWER, calls_tools=True, plain=True, python=options.python)
    streams = [False] if options.whole else [False, True]
    async with AsyncExitStack() as stack:
        engine = stack.enter_context(scripted(model, how))
        servers: dict[str, Server] = {}
        for kind in options.kinds:
            match kind:
                case "litellm":
                    server = litellm(engine, options.litellm)
                case "sglang-router":
                    server = router(engine, options.router)
                case "recorder":
                    server = recorder(engine)
                case "bare":
                    server = bare(engine)
                case "in process":
                    server = in_process(engine)
                case _:
                    server = serving(kind, engine, how)
            servers[kind] = await stack.enter_async_context(server)
        for name, stream, tokens, at_once in product(options.protocols, streams, options.tokens, options.at_once):
            base = 0.0
            for kind in sorted(options.kinds, key=lambda kind: kind != BARE):
                if kind not in (OURS, RECORDER, IN_PROCESS) and (name, stream) != ("chat", False):
                    continue
                found = await replayed(servers[kind], PROTOCOLS[name](tokens, stream), at_once, options)
                rate = len(found.taken) / found.seconds
                base = rate if kind == BARE else base
                per = 1e3 / len(found.taken)
                title = f"{name}, streamed" if stream else name
                cells = [f"{found.tokens / len(found.taken):,.0f}", f"{at_once}", kind, f"{rate:.0f}"]
                cells += [f"{rate / base:.2f}" if base else "", f"{per * found.cpu:.2f}", f"{per * found.own:.2f}"]
                rows.append([title, *cells, *(f"{1e3 * percentile(found.taken, p):.0f}" for p in (50, 99))])
                print("…", *rows[-1], file=sys.stderr, flush=True)
    return markdown(f"Calls with long prompts, {options.turns} turns a rollout", columns, rows)


@asynccontextmanager
async def bare(engine: Engine) -> AsyncIterator[Server]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        yield Bare(engine.url, 0, http)


@asynccontextmanager
async def recorder(engine: Engine) -> AsyncIterator[Server]:
    with tempfile.TemporaryDirectory() as directory:
        arguments = ["--sglang-url", engine.url, "--model-path", engine.model, "--directory", f"{directory}/recorded"]
        with started([sys.executable, "-m", "agl_slime", "record", *arguments]) as (line, pid):
            url = line.removeprefix("recorder at ").removesuffix("/rollouts")
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
                yield Recorder(url, pid, http)


@asynccontextmanager
async def in_process(engine: Engine) -> AsyncIterator[Server]:
    from agl_slime.gateway.server import Gateway
    from agl_slime.runner.process import configure_worker_process

    configure_worker_process()
    with Gateway() as gateway:
        gateway.start()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            yield InProcess(gateway, engine, http)


@asynccontextmanager
async def litellm(engine: Engine, python: str) -> AsyncIterator[Server]:
    with tempfile.TemporaryDirectory() as name:
        config = Path(name) / "litellm.yaml"
        model = {"model": "openai/auto", "api_base": f"{engine.url}/v1", "api_key": "none"}
        local = {"dangerously_permit_weak_or_unset_master_key": True}
        models = [{"model_name": "auto", "litellm_params": model}]
        config.write_bytes(orjson.dumps({"model_list": models, "general_settings": local}))
        command = [str(Path(python).parent / "litellm"), "--config", str(config), "--port", "{port}", "--host", _HOST]
        async with listening(command, "/health/liveliness", Bare) as server:
            yield server


@asynccontextmanager
async def router(engine: Engine, python: str) -> AsyncIterator[Server]:
    command = [python, "-m", "sglang_router.launch_router", "--host", _HOST, "--port", "{port}"]
    command += ["--worker-urls", engine.url, "--policy", "round_robin", "--prometheus-port", "{other_port}"]
    async with listening(command, "/health", Bare) as server:
        yield server


@asynccontextmanager
async def listening(command: list[str], health: str, client: type[Server]) -> AsyncIterator[Server]:
    """A client of the server that ``command`` starts, once ``health`` answers; ``{port}`` stands for a free port."""
    with socket.socket() as first, socket.socket() as second:
        first.bind((_HOST, 0))
        second.bind((_HOST, 0))
        ports = {"{port}": str(first.getsockname()[1]), "{other_port}": str(second.getsockname()[1])}
    arguments = [ports.get(argument, argument) for argument in command]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        url = f"http://{_HOST}:{ports['{port}']}"
        await asyncio.to_thread(wait_for, f"{url}{health}", process)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            yield client(url, process.pid, http)
    finally:
        process.kill()
        process.wait()


class Recorder(Server):
    """``agl-slime record``."""

    async def begun(self, protocol: str = "openai/v1/chat/completions") -> tuple[str, str]:
        answer = orjson.loads(await self.send("POST", "/rollouts", b"{}"))
        path = protocol.split("/", 1)[1]
        return answer["rollout_id"], f"/rollouts/{answer['rollout_id']}/{path}"

    async def ended(self, rollout_id: str) -> None:
        await self.send("POST", f"/rollouts/{rollout_id}/finish", b'{"reward": 1.0}')

    async def delete(self, rollouts: Any) -> None: ...


class InProcess(Server):
    """A gateway of this process, as runners have it."""

    def __init__(self, gateway: Any, engine: Engine, http: aiohttp.ClientSession) -> None:
        from agl_slime.support.agl_types import LLM

        super().__init__(gateway.url, 0, http)
        sampling = {"temperature": 1.0, "max_new_tokens": 256}
        self._gateway, self._llm = gateway, LLM(endpoint=engine.url, model=engine.model, sampling_parameters=sampling)
        self._attempts: dict[str, Any] = {}

    async def begun(self, protocol: str = "openai/v1/chat/completions") -> tuple[str, str]:
        rollout_id, spans = f"ro-{next(_NUMBERS)}", []  # which a runner writes to the store at the end

        def write(*span: Any) -> None:
            spans.append(span)

        attempt, served = self._gateway.open(rollout_id, "0", {"main_llm": self._llm}, write)
        self._attempts[rollout_id] = attempt
        path = protocol.split("/v1", 1)[1]
        return rollout_id, served["main_llm"].endpoint.removeprefix(self._url) + path

    async def ended(self, rollout_id: str) -> None:
        await self._gateway.close(self._attempts.pop(rollout_id))

    async def delete(self, rollouts: Any) -> None: ...


class Bare(Server):
    """The engine itself, or what asks it on: they know no rollouts."""

    async def begun(self, protocol: str = "") -> tuple[str, str]:
        return "", "/v1/chat/completions"

    async def ended(self, rollout_id: str) -> None: ...

    async def delete(self, rollouts: Any) -> None: ...


async def replayed(server: Server, protocol: Protocol, at_once: int, options: Namespace) -> Found:
    found, rollouts = Found(), max(at_once, -(-options.calls // options.turns))
    begun = [await server.begun(protocol.path) for _ in range(rollouts)]
    left = iter(begun[at_once:])

    async def ask(address: str, turns: int, taken: list[float]) -> None:
        said = Said(protocol)
        for _ in range(turns):
            body, start = said.body(), time.perf_counter()
            answer = await server.send("POST", address, body)
            taken.append(time.perf_counter() - start)
            found.tokens += said.hear(answer)

    async def some(address: str) -> None:
        await ask(address, options.turns, found.taken)
        for _, address in left:
            await ask(address, options.turns, found.taken)

    warm = [await server.begun(protocol.path) for _ in range(2)]
    for _, address in warm:  # the stub makes its answers, and templates are compiled
        await ask(address, options.turns, [])
    found.tokens = 0
    cpu, own, start = server.cpu(), time.process_time(), time.perf_counter()
    await asyncio.gather(*(some(address) for _, address in begun[:at_once]))
    found.seconds, found.own = time.perf_counter() - start, time.process_time() - own
    found.cpu = server.cpu() - cpu
    for rollout, _ in [*begun, *warm]:
        await server.ended(rollout)
    await server.delete([rollout for rollout, _ in [*begun, *warm]])
    return found


# -- what clients say -------------------------------------------------------------------------------------------------


def words(count: int) -> str:
    return " ".join(random.Random(count).choices(WORDS, k=count))


def tools_of(count: int) -> list[dict[str, Any]]:
    def schema(at: int) -> dict[str, Any]:
        path = {"type": "string", "description": words(8 + at)}
        parameters = {"type": "object", "properties": {"path": path}, "required": ["path"]}
        return {"name": f"tool_{at}", "description": words(20 + at), "parameters": parameters}

    return [{"type": "function", "function": schema(at)} for at in range(count)]


class Protocol:
    """A body is ``head``, what was said so far, and ``tail``."""

    path = "openai/v1/chat/completions"
    joint = b","

    def __init__(self, tokens: int, stream: bool) -> None:
        self.tools = tools_of(min(30, tokens // 150))
        self.system = words(max(8, tokens - 75 * len(self.tools)))
        self.stream = stream

    def parts(self) -> tuple[bytes, bytes, bytes]:
        """Head, what is said first, tail."""
        first = [{"role": "system", "content": self.system}, {"role": "user", "content": words(24)}]
        rest = {"model": "auto", "stream": self.stream, "tools": self.tools}
        return b'{"messages":[', orjson.dumps(first)[1:-1], b"]," + orjson.dumps(rest)[1:]

    def heard(self, answer: bytes) -> tuple[list[Any], int]:
        """What is to be said next, and the tokens of the prompt where the answer says so."""
        if self.stream:
            message: dict[str, Any] = {"role": "assistant", "content": ""}
            for event in events(answer):
                delta = event["choices"][0]["delta"]
                message["content"] += delta.get("content") or ""
                message.setdefault("tool_calls", []).extend(delta.get("tool_calls") or ())
            return [message, *self.results(message)], 0
        told = orjson.loads(answer)
        message = told["choices"][0]["message"]
        return [message, *self.results(message)], told["usage"]["prompt_tokens"]

    def results(self, message: dict[str, Any]) -> list[Any]:
        return [
            {"role": "tool", "tool_call_id": call["id"], "content": words(_OBSERVATION)}
            for call in message["tool_calls"]
        ]


class Messages(Protocol):
    path = "anthropic/v1/messages"

    def parts(self) -> tuple[bytes, bytes, bytes]:
        functions = [tool["function"] for tool in self.tools]
        tools = [{**each, "input_schema": each["parameters"]} for each in functions]
        head = {"max_tokens": 128, "system": self.system, "messages": []}
        rest = {"model": "auto", "stream": self.stream, "tools": tools}
        first = {"role": "user", "content": words(24)}
        return orjson.dumps(head)[:-2], orjson.dumps(first), b"]," + orjson.dumps(rest)[1:]

    def heard(self, answer: bytes) -> tuple[list[Any], int]:
        said: list[dict[str, Any]] = []
        tokens = 0
        if self.stream:
            for event in events(answer):
                if event["type"] == "content_block_start":
                    said.append(event["content_block"])
                elif event["type"] == "content_block_delta":
                    kind, *_, value = event["delta"].values()
                    if kind == "input_json_delta":
                        said[-1]["input"] = orjson.loads(value)
                    else:
                        said[-1][kind.removesuffix("_delta")] += value
        else:
            told = orjson.loads(answer)
            said, tokens = told["content"], told["usage"]["input_tokens"]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": words(_OBSERVATION)}
            for block in said
            if block["type"] == "tool_use"
        ]
        return [{"role": "assistant", "content": said}, {"role": "user", "content": results}], tokens


class Responses(Protocol):
    path = "openai/v1/responses"

    def parts(self) -> tuple[bytes, bytes, bytes]:
        tools = [{"type": "function", **tool["function"]} for tool in self.tools]
        rest = {"model": "auto", "stream": self.stream, "store": False, "tools": tools}
        first = {"role": "user", "content": words(24)}
        head = orjson.dumps({"instructions": self.system, "input": []})[:-2]
        return head, orjson.dumps(first), b"]," + orjson.dumps(rest)[1:]

    def heard(self, answer: bytes) -> tuple[list[Any], int]:
        told = [*events(answer)][-1]["response"] if self.stream else orjson.loads(answer)
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": words(_OBSERVATION)}
            for item in told["output"]
            if item["type"] == "function_call"
        ]
        return [*told["output"], *results], told["usage"]["input_tokens"]


class Completions(Protocol):
    path, joint = "openai/v1/completions", b""

    def parts(self) -> tuple[bytes, bytes, bytes]:
        rest = orjson.dumps({"model": "auto", "stream": self.stream, "max_tokens": 128})
        return b'{"prompt":"', orjson.dumps(self.system)[1:-1], b'",' + rest[1:]

    def heard(self, answer: bytes) -> tuple[list[Any], int]:
        tokens = 0
        if self.stream:
            text = "".join(event["choices"][0]["text"] for event in events(answer))
        else:
            told = orjson.loads(answer)
            text, tokens = told["choices"][0]["text"], told["usage"]["prompt_tokens"]
        return [f"{text} {words(_OBSERVATION)}"], tokens


PROTOCOLS: dict[str, type[Protocol]] = {
    "chat": Protocol,
    "messages": Messages,
    "responses": Responses,
    "completions": Completions,
}


class Said:
    """One conversation as its client holds it, in bytes."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._head, self._so_far, self._tail = protocol.parts()

    def body(self) -> bytes:
        return self._head + self._so_far + self._tail

    def hear(self, answer: bytes) -> int:
        said, tokens = self._protocol.heard(answer)
        new = b"".join(self._protocol.joint + orjson.dumps(item) for item in said)
        self._so_far += new if self._protocol.joint else orjson.dumps(said[0])[1:-1]
        return tokens


def events(stream: bytes) -> Iterator[Any]:
    for event in stream.split(b"\n\n"):
        data = event.partition(b"data: ")[2]
        if data and data != b"[DONE]":
            yield orjson.loads(data)


if __name__ == "__main__":
    sys.exit(main())
