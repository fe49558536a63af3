"""The gateway beside ``SGLangLitAgent``: rollouts per second with many in flight, and the cost of a call.

    python -m benchmarks.gateway [--in-flight 1024] [--rounds 4] [--quick] [--sglang-url URL --model-path DIR]

In flight: each rollout asks a scripted engine once, which answers after 2 s on average, as in ``benchmarks.in_flight``:
with ``n`` in flight the ideal is ``n / 2`` rollouts per second. *SGLangLitAgent* is an ordinary one; the others
are ``@agl.rollout`` functions with an HTTP client of their own, in the same process as runner and gateway. *Bare* is
the limit of such an agent: the same runner, agent and client, without a gateway, at a server that answers with the same
few bytes as long after. The time of ``openai`` on httpx is httpx's: its pool walks over all connections for each
request (``openai[aiohttp]`` does not).

Per call, with ``--sglang-url``: one request after the other, and 32 at a time, to the ``/v1/chat/completions`` of a
SGLang that serves ``--model-path`` and through the gateway to the same SGLang, 8 tokens each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Any

from benchmarks.common import REPO, console, load, percentile, print_table, quiet, scripted_engine

AGENTS = {
    "sglang": "SGLangLitAgent",
    "aiohttp": "aiohttp through the gateway",
    "openai-aiohttp": "openai client on aiohttp, through the gateway",
    "openai": "openai client on httpx, through the gateway",
}
BARE = "-bare"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--in-flight", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=4, help="rollouts per place in flight")
    parser.add_argument("--calls", type=int, default=1000, help="how many, each way")
    parser.add_argument("--quick", action="store_true", help="two rounds, fewer calls")
    parser.add_argument("--cases", nargs="*", choices=[*AGENTS, "calls"])
    parser.add_argument("--sglang-url", help="a running SGLang, for the calls")
    parser.add_argument("--model-path", help="the checkpoint that it serves")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cases is None:
        options.cases = [*AGENTS, "calls"] if options.sglang_url else [*AGENTS]
    elif "calls" in options.cases and not options.sglang_url:
        parser.error("--cases calls needs --sglang-url: the embedded engine has no chat completions of its own")
    rounds = 3 if options.quick else options.rounds
    if options.case:
        quiet()
        if options.case == "calls":
            print(json.dumps(calls(200 if options.quick else options.calls, options.sglang_url, options.model_path)))
            return 0
        with scripted_engine(latency_s=2.0, spread_s=1.0) as engine:
            print(json.dumps(asyncio.run(in_flight(options.case, engine, options.in_flight, rounds))))
        return 0
    rows = []
    base = 0.0
    for name, label in AGENTS.items():
        if name not in options.cases or (name == "openai-aiohttp" and find_spec("httpx_aiohttp") is None):
            continue  # pip install "openai[aiohttp]"
        limit = run_case(name + BARE, options) if name != "sglang" else {"rate": 0.0, "cpu_ms": 0.0}
        found = run_case(name, options)
        base = base or found["rate"]
        rows.append([label, f"{found['rate']:.1f}", f"{found['rate'] / base:.2f}", f"{found['cpu_ms']:.2f}"])
        rows[-1] += [f"{limit['rate']:.1f}", f"{limit['cpu_ms']:.2f}", f"{found['load']:.1f}"]
        if limit["rate"]:
            rows[-1].append(f"{found['rate'] / limit['rate']:.2f}")
        else:
            rows[-1][4:6] = ["", ""]
            rows[-1].append("")
    columns = ["", "rollouts/s", "of SGLangLitAgent", "CPU ms", "bare", "its CPU ms", "load", "of bare"]
    if rows:
        print_table(f"{options.in_flight:,} in flight, ideal {options.in_flight / 2:g}/s", columns, rows)
    if "calls" not in options.cases:
        return 0
    found = run_case("calls", options)
    rows = [
        [label, str(at_once), *(f"{found[key][name]:.1f}" for name in ("p50", "p99"))]
        for label, key, at_once in (
            ("the engine's own chat completions", "engine 1", 1),
            ("through the gateway", "gateway 1", 1),
            ("the engine's own chat completions", "engine 32", 32),
            ("through the gateway", "gateway 32", 32),
        )
    ]
    print_table("A call of 8 tokens, SGLang", ["", "at once", "p50 ms", "p99 ms"], rows)
    return 0


def run_case(name: str, options: argparse.Namespace) -> dict[str, Any]:
    console.print(f"{name} … ({load()})", highlight=False)
    command = [sys.executable, "-m", "benchmarks.gateway", "--case", name, "--in-flight", str(options.in_flight)]
    command += ["--rounds", str(options.rounds), "--calls", str(options.calls), *(["--quick"] if options.quick else [])]
    if options.sglang_url:
        command += ["--sglang-url", options.sglang_url, "--model-path", options.model_path]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def agent_of(name: str) -> Any:
    import agentlightning as agl

    from benchmarks.common import question_agent

    if name == "sglang":
        return question_agent()
    if name.startswith("openai"):
        import httpx
        from openai import AsyncOpenAI, DefaultAioHttpClient

        limits = httpx.Limits(max_connections=10_000, max_keepalive_connections=10_000)
        http = (httpx.AsyncClient if name == "openai" else DefaultAioHttpClient)(limits=limits, timeout=600)
        client = AsyncOpenAI(base_url="http://127.0.0.1:9", api_key="none", http_client=http)

        @agl.rollout
        async def by_openai(task: dict[str, Any], llm: agl.LLM) -> float:
            ask = client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions.create
            said = await ask(model=llm.model, messages=[{"role": "user", "content": task["prompt"]}])
            return float(bool(said.choices[0].message.content))

        return by_openai
    import aiohttp

    sessions: list[aiohttp.ClientSession] = []

    @agl.rollout
    async def by_aiohttp(task: dict[str, Any], llm: agl.LLM) -> float:
        if not sessions:
            sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        body = {"model": llm.model, "messages": [{"role": "user", "content": task["prompt"]}]}
        async with sessions[0].post(f"{llm.endpoint}/chat/completions", json=body) as answer:
            return float(bool((await answer.json())["choices"]))

    return by_aiohttp


async def in_flight(name: str, engine: str, count: int, rounds: int) -> dict[str, Any]:
    import os

    from agl_slime.agent.access import EngineAccess
    from agl_slime.gateway.server import Gateway
    from agl_slime.runner.concurrent import RunnerSettings, RunnerThread
    from agl_slime.runner.process import configure_worker_process
    from agl_slime.store.bridge import BridgeStore, Retention
    from agl_slime.support.agl import ProxyLLM
    from benchmarks.common import Stopwatch, llm_resources, tokenizer
    from benchmarks.in_flight import consume, execute, steady_rate

    configure_worker_process()
    made = Gateway.__init__

    def with_tokenizer(self: Gateway, settings: Any = None, **more: Any) -> None:  # the scripted model has no directory
        made(self, settings, access=EngineAccess(tokenizer=tokenizer()))

    Gateway.__init__ = with_tokenizer  # type: ignore[method-assign]
    store = BridgeStore(retention=Retention(released_rollouts=0))
    resources = llm_resources(engine)
    if name.endswith(BARE):  # somebody else's address, which the gateway leaves alone
        name = name.removesuffix(BARE)
        resources = {"main_llm": ProxyLLM(endpoint=f"{engine}/v1", model="scripted")}
    await store.add_resources(resources)
    ended: list[str] = []
    store.subscribe_finished(lambda rollout: ended.append(rollout.rollout_id))
    runner = RunnerThread(agent=agent_of(name), store=store, settings=RunnerSettings(max_concurrent=count))
    await asyncio.to_thread(runner.start)
    done = asyncio.Event()
    try:
        await execute(store, runner, 64)
        consumer = asyncio.create_task(consume(store, ended, done))
        watch = Stopwatch()
        ends = await execute(store, runner, count * rounds)
        cpu = watch.cpu
        done.set()
        await consumer
    finally:
        await asyncio.to_thread(runner.stop)
    rate = steady_rate(ends, count)
    return {"rate": rate, "cpu_ms": 1e3 * cpu / (count * rounds), "load": os.getloadavg()[0]}


def calls(count: int, url: str, model: str) -> dict[str, Any]:
    from agl_slime.gateway.server import Gateway
    from agl_slime.support.agl import LLM

    found: dict[str, Any] = {}
    with Gateway() as gateway:
        llm = LLM(endpoint=url, model=model, sampling_parameters={"max_new_tokens": 8})
        for at_once in (1, 32):
            found[f"engine {at_once}"] = asyncio.run(timed([f"{url}/v1"], count, at_once))
            opened = [gateway.open(f"ro-{at_once}-{n}", "at", {"main_llm": llm}, lambda *_: None) for n in range(count)]
            urls = [served["main_llm"].endpoint for _, served in opened]  # type: ignore[union-attr]
            found[f"gateway {at_once}"] = asyncio.run(timed(urls, count, at_once))
    return found


async def timed(urls: list[str], count: int, at_once: int) -> dict[str, float]:
    import aiohttp

    body = {"model": "m", "messages": [{"role": "user", "content": 'What is stored under "kz"?'}], "max_tokens": 8}
    taken: list[float] = []
    left = iter(range(count))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask() -> None:
            for number in left:
                began = time.perf_counter()
                async with session.post(f"{urls[number % len(urls)]}/chat/completions", json=body) as answer:
                    answer.raise_for_status()
                    await answer.read()
                taken.append(time.perf_counter() - began)

        await asyncio.gather(*(ask() for _ in range(at_once)))
    return {"p50": 1e3 * percentile(taken, 50), "p99": 1e3 * percentile(taken, 99)}


if __name__ == "__main__":
    sys.exit(main())
