"""Agent Lightning 1.0's API as this package serves it beside 1.0's own ``agl-server``, with the same stub engine.

    AGL_CONTROLLER_PYTHON=DIR/bin/python python -m benchmarks.agl1_server [--quick]

Prints three tables as markdown: calls per second and CPU of the server per call, the memory that is kept of a rollout,
and the share of turns whose prompt begins with the ids of the turn before and of its answer.

Server, stub and clients are three processes. A rollout is created, said to run, asks ``--turns`` times in one
conversation that begins with a prompt of so many tokens, posts a reward and is said to have succeeded; its CPU time is
shared among its calls. The stub answers at once, ``/generate`` as SGLang does and chat completions as vLLM does, with
ids and log-probs; what it sends is made beforehand. Neither server forgets anything meanwhile: no trainer reads.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import aiohttp
import orjson
import psutil

from benchmarks.common import REPO, cpu_seconds, load, resident_bytes
from benchmarks.multi_turn import WORDS
from tests.harness.tokenizers import DROPS_THINKING, PLAIN

OURS, THEIRS = "agl-slime", "agl-server"
TEMPLATES = {
    "as it is": PLAIN,
    "stripped of white space": PLAIN.replace("{{ m.content }}", "{{ m.content | trim }}"),
    "without the thinking of earlier turns": DROPS_THINKING,
}
_START_S = 60.0
_ME = [sys.executable, "-m", "benchmarks.agl1_server"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[200, 3_600, 22_000], help="of the first prompt")
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 16, 256], help="rollouts")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--answer-words", type=int, default=16, help="of its thinking, and again of its text")
    parser.add_argument("--calls", type=int, default=400, help="at least so many per measurement")
    parser.add_argument("--repeats", type=int, default=3, help="the median counts")
    parser.add_argument(
        "--quick", action="store_true", help="the second size, the first two numbers at once, one measurement each"
    )
    parser.add_argument("--python", default=os.environ.get("AGL_CONTROLLER_PYTHON"), help="has agentlightning 1.x")
    parser.add_argument("--only", choices=(OURS, THEIRS))
    parser.add_argument("--tables", nargs="*", default=["calls", "memory", "prefixes"])
    parser.add_argument("--plain", action="store_true", help="answers without what 1.0's proxy adds: ids, log-probs")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.model, plain=options.plain)
    if options.quick:
        options.tokens, options.at_once, options.repeats = options.tokens[1:2], options.at_once[:2], 1
    if not options.python and options.only != OURS:
        parser.error("--python (AGL_CONTROLLER_PYTHON): name a Python that has agentlightning 1.x")
    with tempfile.TemporaryDirectory() as directory:
        models = {
            name: saved(template, Path(directory) / str(n)) for n, (name, template) in enumerate(TEMPLATES.items())
        }
        tables = {"calls": calls, "memory": memory, "prefixes": prefixes}
        for name in options.tables:
            print(tables[name](models, options), flush=True)
    return 0


def saved(template: str, directory: Path, *, texts: Sequence[str] = (), vocab_size: int = 316) -> str:
    """A tokenizer to which each word of the prompts is a token, and most of ``texts``."""
    from agl_slime.tools.demo_policy.tokenizer import train_tokenizer

    tokenizer = train_tokenizer([*[" ".join(WORDS)] * 2, *texts], vocab_size=vocab_size, max_length=10**6)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return str(directory)


# -- the tables -------------------------------------------------------------------------------------------------------


def calls(models: dict[str, str], options: argparse.Namespace) -> str:
    columns = ["tokens", "at once", "calls/s", "of agl-server", "ratio", "CPU ms a call", "of agl-server", "ratio"]
    found = asyncio.run(timed(models["as it is"], options))
    rows = []
    for tokens, at_once in product(options.tokens, options.at_once):
        (rate, cpu), (other_rate, other_cpu) = (found.get((k, tokens, at_once), (0.0, 0.0)) for k in (OURS, THEIRS))
        cells = [f"{rate:.0f}", f"{other_rate:.0f}", ratio(rate, other_rate)]
        cells += [f"{cpu:.2f}", f"{other_cpu:.2f}", ratio(cpu, other_cpu)]
        rows.append([f"{tokens:,}", f"{at_once}", *cells])
    title = f"Model calls, {options.turns} turns a rollout, median of {options.repeats}"
    return markdown(title, columns, rows)


async def timed(model: str, options: argparse.Namespace) -> dict[tuple[str, int, int], tuple[float, float]]:
    """Calls per second and milliseconds of the server's CPU per call: medians, by server, tokens and rollouts at
    once. The two take turns, so that what else the machine does meets both."""
    found: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        engine = stack.enter_context(scripted(model, options))
        servers = {kind: await stack.enter_async_context(serving(kind, engine, options)) for kind in kinds(options)}
        for tokens in options.tokens:
            spoken = {kind: await server.learn(tokens, options.turns) for kind, server in servers.items()}
            for at_once, _ in product(options.at_once, range(options.repeats)):
                rollouts = max(at_once, -(-options.calls // options.turns))
                for kind, server in servers.items():
                    cpu, began = server.cpu(), time.perf_counter()
                    done = await server.replay(spoken[kind], rollouts, at_once)
                    seconds, cpu = time.perf_counter() - began, server.cpu() - cpu
                    made = rollouts * options.turns
                    found[kind, tokens, at_once].append((made / seconds, 1e3 * cpu / made))
                    said = f"{kind}, {tokens:,} tokens, {at_once} at once: {made / seconds:.0f} calls/s"
                    print(f"… {said}, {1e3 * cpu / made:.2f} ms ({load()})", file=sys.stderr, flush=True)
                    await server.delete(done)
    return {key: (median(rate for rate, _ in many), median(cpu for _, cpu in many)) for key, many in found.items()}


def memory(models: dict[str, str], options: argparse.Namespace) -> str:
    columns = ["tokens", "turns", "tokens at the end", "kB a rollout", "of agl-server", "ratio"]
    columns += ["kB a further turn", "of agl-server"]
    rows = []
    steps = sorted({max(1, options.turns // 4), max(1, options.turns // 2), options.turns})
    with scripted(models["as it is"], options) as engine:
        for tokens in options.tokens:
            grown = {kind: asyncio.run(kept(kind, engine, tokens, steps, options)) for kind in kinds(options)}
            earlier, (ours_then, theirs_then) = 0, (0.0, 0.0)
            for n, turns in enumerate(steps):
                (ours, ends), (theirs, other) = (grown[k][n] if k in grown else (0.0, 0) for k in (OURS, THEIRS))
                cells = [f"{ours / 1e3:,.0f}", f"{theirs / 1e3:,.0f}", ratio(ours, theirs)]
                further = 1e3 * (turns - earlier)
                cells += [f"{(ours - ours_then) / further:.1f}", f"{(theirs - theirs_then) / further:.1f}"]
                rows.append([f"{tokens:,}", f"{turns}", f"{ends or other:,}", *cells])
                earlier, ours_then, theirs_then = turns, ours, theirs
    return markdown("Memory that is kept of a rollout that has ended", columns, rows)


async def kept(
    kind: str, engine: Engine, tokens: int, steps: Sequence[int], options: argparse.Namespace
) -> list[tuple[float, int]]:
    """Resident bytes that a rollout of so many turns leaves, and its tokens at the end."""
    # so many that what is measured stands out from what an allocator keeps anyway
    count, found = max(16, min(256, 400_000 // tokens)), []
    async with serving(kind, engine, options) as server:
        await server.replay(await server.learn(tokens, steps[-1]), 16, 16)
        for turns in steps:
            spoken = await server.learn(tokens, turns)
            before = resident_bytes(server.pid)
            await server.replay(spoken, count, 16)
            found.append(((resident_bytes(server.pid) - before) / count, server.ends))
    return found


def prefixes(models: dict[str, str], options: argparse.Namespace) -> str:
    rows = []
    for name, model in list(models.items())[1:]:
        shares = {OURS: 0.0, THEIRS: 0.0}
        with scripted(model, options) as engine:
            for kind in kinds(options):
                shares[kind] = asyncio.run(share_kept(kind, engine, options))
        rows.append([name, f"{shares[OURS]:.0%}", f"{shares[THEIRS]:.0%}"])
    title = f"Turns whose prompt begins with the ids of the turn before and of its answer, {options.turns} turns"
    return markdown(title, ["the template renders answers", OURS, THEIRS], rows)


async def share_kept(kind: str, engine: Engine, options: argparse.Namespace) -> float:
    async with serving(kind, engine, options) as server:
        await server.learn(200, options.turns)
        return server.prefixes_kept


def kinds(options: argparse.Namespace) -> Sequence[str]:
    return (options.only,) if options.only else (OURS, THEIRS)


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def ratio(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}" if theirs else "–"


def markdown(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [list(columns), ["---", *["---:"] * (len(columns) - 1)], *rows]
    return f"\n{title} ({load()}):\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- clients ----------------------------------------------------------------------------------------------------------


class Server:
    """One of the two, in a process of its own, and what a trainer, a controller and agents ask of it."""

    def __init__(self, url: str, pid: int, http: aiohttp.ClientSession) -> None:
        self.pid, self.ends, self.prefixes_kept = pid, 0, 0.0
        own = psutil.Process(pid) if pid else None
        self._processes = [own, *own.children(recursive=True)] if own is not None else []
        self._url, self._http = url, http

    def cpu(self) -> float:
        """CPU seconds of the server and its children."""
        return sum(cpu_seconds(process.pid) for process in self._processes)

    def resident(self) -> int:
        """Resident bytes of the server and its children."""
        return sum(resident_bytes(process.pid) for process in self._processes)

    async def send(self, method: str, path: str, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json", "Authorization": "Bearer the-key"}
        async with self._http.request(method, self._url + path, data=body, headers=headers) as answer:
            raw = await answer.read()
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status} {raw[:400].decode(errors='replace')}")
            return raw

    async def rollout(self, bodies: Sequence[bytes]) -> str:
        rollout, address = await self.begun()
        for body in bodies:
            await self.send("POST", address, body)
        await self.ended(rollout)
        return rollout

    async def begun(self, protocol: str = "openai/v1/chat/completions") -> tuple[str, str]:
        """A new rollout's id, and the path that its model is asked at."""
        [rollout] = orjson.loads(await self.send("POST", "/api/rollouts", b'[{"input": {"question": "what?"}}]'))
        rollout_id = rollout["rollout_id"]
        await self._patch(rollout_id, state="running", last_attempt_id="0")
        return rollout_id, f"/proxy/rollout/{rollout_id}/attempt/0/mode/train/{protocol}"

    async def ended(self, rollout_id: str) -> None:
        event = orjson.dumps({"event_type": "reward", "data": {"value": 1.0}})
        await self.send("POST", f"/api/rollouts/{rollout_id}/attempt/0/events", event)
        await self._patch(rollout_id, state="succeeded", last_attempt_id="0")

    async def _patch(self, rollout_id: str, **status: str) -> None:
        await self.send("PATCH", f"/api/rollouts/{rollout_id}", orjson.dumps({"status": status}))

    async def learn(self, tokens: int, turns: int) -> list[bytes]:
        """One rollout, whose requests are what all others send: the stub says the same to each."""
        rng = random.Random(tokens)
        # a word is a token, nearly always
        messages: list[dict[str, str]] = [{"role": "user", "content": " ".join(rng.choices(WORDS, k=tokens - 8))}]
        bodies, before, kept = [], None, 0
        rollout, address = await self.begun()
        for _ in range(turns):
            bodies.append(orjson.dumps({"model": "auto", "messages": messages}))
            said = orjson.loads(await self.send("POST", address, bodies[-1]))
            choice = said["choices"][0]
            prompt = said.get("prompt_token_ids") or choice["prompt_token_ids"]
            kept += before is not None and prompt[: len(before)] == before
            before = prompt + choice["token_ids"]
            question = {"role": "user", "content": " ".join(rng.choices(WORDS, k=24))}
            messages = [*messages, {"role": "assistant", "content": choice["message"]["content"]}, question]
        await self.ended(rollout)
        assert before is not None
        self.ends, self.prefixes_kept = len(before), kept / max(1, turns - 1)
        return bodies

    async def replay(self, bodies: Sequence[bytes], rollouts: int, at_once: int) -> list[str]:
        left, done = iter(range(rollouts)), []

        async def some() -> None:
            for _ in left:
                done.append(await self.rollout(bodies))

        await asyncio.gather(*(some() for _ in range(at_once)))
        return done

    async def delete(self, rollouts: Sequence[str]) -> None:
        for rollout in rollouts:
            await self.send("DELETE", f"/api/rollouts/{rollout}", b"")


@dataclass(frozen=True)
class Engine:
    url: str
    model: str


@contextmanager
def scripted(model: str, options: argparse.Namespace) -> Iterator[Engine]:
    command = [sys.executable, "-m", "benchmarks.agl1_stub", model, str(options.answer_words)]
    command += ["--calls"] if getattr(options, "calls_tools", False) else []
    with started(command) as (url, _):
        yield Engine(url, model)


@asynccontextmanager
async def serving(kind: str, engine: Engine, options: argparse.Namespace) -> AsyncIterator[Server]:
    ours = [*_ME, "--serve", engine.url, "--model", engine.model, *(["--plain"] if options.plain else [])]
    with started(ours) if kind == OURS else theirs(engine, options) as (url, pid):
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            yield Server(url, pid, http)


@contextmanager
def theirs(engine: Engine, options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["host=127.0.0.1", f"port={port}", "key=the-key", "default_proxy.model_name=scripted"]
    flags += ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    process = subprocess.Popen(
        [options.python, "-m", "agentlightning.server", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{url}/healthz", process)
        model = orjson.dumps([{"model": "scripted", "endpoint": f"{engine.url}/v1"}])
        headers = {"Content-Type": "application/json", "Authorization": "Bearer the-key"}
        urllib.request.urlopen(urllib.request.Request(f"{url}/api/models", model, headers), timeout=10).close()
        yield url, process.pid
    finally:
        process.kill()
        process.wait()


@contextmanager
def started(command: Sequence[str]) -> Iterator[tuple[str, int]]:
    """A process that says its address when it listens, and its pid."""
    process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if not (url := process.stdout.readline().strip()):
            raise RuntimeError(f"{' '.join(command)} ended with {process.wait(10)}")
        yield url, process.pid
    finally:
        process.kill()
        process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + _START_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"agl-server does not start (exit code {process.poll()})") from None
            time.sleep(0.1)


# -- our server ----------------------------------------------------------------------------------------------------


def serve(engine: str, model: str, *, plain: bool) -> int:
    """The API over a store that nobody reads, as a run has it."""
    from agl_slime.gateway.agl1.server import ControllerGateway
    from agl_slime.runner.process import configure_worker_process
    from agl_slime.store.bridge import BridgeStore
    from agl_slime.support.agl import LLM
    from agl_slime.support.threads import run_blocking
    from benchmarks.common import quiet

    configure_worker_process()
    quiet()
    store = BridgeStore()
    sampling = {"temperature": 1.0, "max_new_tokens": 256}
    run_blocking(store.add_resources({"main_llm": LLM(endpoint=engine, model=model, sampling_parameters=sampling)}))
    gateway = ControllerGateway(store=store, key="the-key")
    if plain:
        gateway.defaults = {}
    with gateway:
        print(gateway.url, flush=True)
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
