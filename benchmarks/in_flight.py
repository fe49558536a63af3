"""Rollouts in flight: how many one process holds, how near to the ideal they come, and what each costs.

    python -m benchmarks.in_flight [--quick]

A rollout asks a scripted engine once over HTTP, which answers after 2 s on average, evenly spread over 1.5 to 2.5 s
(answers that all come at the same moment are a case of their own: ``--spread 0``). Rollouts come in groups of 8 with
one prompt. With ``n`` in flight the ideal is ``n / 2`` rollouts per second. Beside ours stands stock Agent Lightning
(``LitAgentRunner``, ``OtelTracer``, its own store server and client), the same agent in 1, 4 and 8 processes, polling a
hundred times as often as its default and without its OTLP exporter, which does not work with OpenTelemetry 1.45. The
limit is *bare aiohttp*: tasks of one process that send the same request and parse the answer, and nothing else. Every
case runs in a fresh process.

*CPU* is the CPU time per rollout of all processes but the engine's. *kB in flight* is what resident memory grows by,
per rollout, when as many are waiting for the engine (in one process). Rates leave out the first and the last round, in
which places fill and empty. *per GB* is rollouts per second and gigabyte of resident memory, store included. Takes
about 6 minutes; ``--quick`` 1 minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

from agl_slime.runner.process import configure_worker_process, freeze_gc
from benchmarks.common import (
    PATIENCE_S,
    REPO,
    Countdown,
    Peak,
    Stopwatch,
    console,
    cpu_seconds,
    llm_resources,
    load,
    print_table,
    question_agent,
    quiet,
    requests,
    resident_bytes,
    scripted_engine,
    settle_memory,
)

_GROUP = 8
_PROCESSES = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases, fewer rollouts")
    parser.add_argument("--latency", type=float, default=2.0, help="seconds until the engine answers")
    parser.add_argument("--spread", type=float, default=1.0, help="seconds between the quickest and the slowest answer")
    parser.add_argument("--rounds", type=int, default=6, help="rollouts per place in flight")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--url", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case == "stock-worker":
        quiet()
        asyncio.run(stock_worker(options.url, options.count))
        return 0
    if options.case:
        quiet()
        case = {"ours": ours, "processes": processes, "stock": stock, "bare": bare}[options.case]
        with scripted_engine(latency_s=options.latency, spread_s=options.spread) as engine:
            print(json.dumps(asyncio.run(case(engine, options.count, options.rounds))))
        return 0

    rounds = 3 if options.quick else options.rounds
    cases = (
        [("ours", 256), ("ours", 1024), ("stock", 1)]
        if options.quick
        else [
            ("ours", 256),
            ("ours", 1024),
            ("ours", 4096),
            ("processes", 4096),
            ("bare", 4096),
            ("stock", 1),
            ("stock", 4),
            ("stock", 8),
        ]
    )
    results = [(name, count, run_case(name, count, rounds, options)) for name, count in cases]
    stock_best = max((r["rate"] / r["gb"] for name, _, r in results if name == "stock"), default=0.0)
    rows = []
    for name, count, r in results:
        ideal = count / options.latency
        label = {
            "ours": f"agl-slime, 1 process, {count:,} in flight",
            "processes": f"agl-slime, process:{_PROCESSES}, {count:,} in flight",
            "bare": f"bare aiohttp, 1 process, {count:,} in flight",
            "stock": f"Agent Lightning, {count} process{'es' if count > 1 else ''}",
        }[name]
        rows.append(
            [
                label,
                f"{r['rate']:.1f}",
                f"{ideal:.1f}",
                f"{r['rate'] / ideal:.0%}",
                f"{r['cpu_ms']:.2f}",
                f"{r['kb_in_flight']:.0f}" if name == "ours" else "-",
                f"{r['gb'] * 1024:.0f}",
                f"{r['rate'] / r['gb']:.1f}",
                f"{r['rate'] / r['gb'] / stock_best:.0f}x" if stock_best and name != "bare" else "-",
                f"{r['load']:.1f}",
            ]
        )
    columns = ["", "rollouts/s", "ideal", "of ideal", "CPU ms", "kB in flight", "RSS MB", "per GB", "vs stock", "load"]
    print_table(f"In flight: {options.latency:g} s of simulated model time, {rounds} rounds", columns, rows)
    return 0


def run_case(name: str, count: int, rounds: int, options: argparse.Namespace) -> dict[str, Any]:
    console.print(f"{name} {count} … ({load()})", highlight=False)
    command = [
        sys.executable,
        "-m",
        "benchmarks.in_flight",
        "--case",
        name,
        "--count",
        str(count),
        "--rounds",
        str(rounds),
        "--latency",
        str(options.latency),
        "--spread",
        str(
            options.spread if name != "stock" else 0.0
        ),  # few processes never answer at once, and need no luck in the few answers that they get
    ]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{name} {count} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


async def ours(engine: str, count: int, rounds: int) -> dict[str, Any]:
    return await bridge("inproc", engine, count, rounds)


async def processes(engine: str, count: int, rounds: int) -> dict[str, Any]:
    return await bridge(f"process:{_PROCESSES}", engine, count, rounds)


async def bridge(plan: str, engine: str, count: int, rounds: int) -> dict[str, Any]:
    from agl_slime.runner.base import RunnerPlan, make_runners
    from agl_slime.runner.concurrent import RunnerSettings
    from agl_slime.store.bridge import BridgeStore, Retention

    configure_worker_process()
    store = BridgeStore(retention=Retention(released_rollouts=0))
    await store.add_resources(llm_resources(engine))
    settings = RunnerSettings(max_concurrent=count // (RunnerPlan.parse(plan).count or 1))
    ended: list[str] = []
    store.subscribe_finished(lambda rollout: ended.append(rollout.rollout_id))
    runner = make_runners(replace(RunnerPlan.parse(plan), settings=settings), agent=question_agent(), store=store)
    await asyncio.to_thread(runner.start)
    try:
        workers = [child.pid or 0 for child in multiprocessing.active_children()]
        await execute(store, runner, 64)  # imports, code paths and pools that are made once
        await store.release(ended)
        ended.clear()
        # one round for the memory: all but the waiting rollouts must stay constant
        settle_memory()
        before = resident_bytes()
        with Peak() as peak:
            await execute(store, runner, count)
        in_flight_bytes = (peak.bytes - before) / count
        await store.release(ended)
        ended.clear()
        total = count * rounds
        watch, cpu_before = Stopwatch(), sum(map(cpu_seconds, workers))
        with Peak(["self", *workers]) as peak:
            done = asyncio.Event()
            consumer = asyncio.create_task(consume(store, ended, done))
            ends = await execute(store, runner, total)
            cpu = watch.cpu + sum(map(cpu_seconds, workers)) - cpu_before
            done.set()
            await consumer
    finally:
        await asyncio.to_thread(runner.stop)
    statuses = store.usage()
    assert statuses.running == 0
    return {
        "rate": steady_rate(ends, count),
        "cpu_ms": 1e3 * cpu / total,
        "kb_in_flight": in_flight_bytes / 1e3,
        "gb": peak.bytes / 2**30,
        "load": os.getloadavg()[0],
    }


def steady_rate(ends: list[float], count: int) -> float:
    """Rollouts per second while all places were taken: without the first round, which fills them, and the last, in
    which they empty."""
    ends = sorted(ends)
    return (len(ends) - 2 * count) / (ends[-count] - ends[count])


async def execute(store: Any, runner: Any, count: int) -> list[float]:
    """Enqueue ``count`` rollouts and wait for them; returns their end times."""
    left = Countdown(count)
    failed: list[str] = []
    ends: list[float] = []

    def ended(rollout: Any) -> None:
        ends.append(rollout.end_time)
        if rollout.status != "succeeded":
            failed.append(rollout.rollout_id)
        left.down()

    unsubscribe = store.subscribe_finished(ended)
    await store.enqueue_many_rollouts(requests(count, group_size=_GROUP))
    runner.wake()
    await left.wait(PATIENCE_S)
    unsubscribe()
    if failed:
        raise RuntimeError(f"{len(failed)} of {count} rollouts failed")
    return ends


async def consume(store: Any, ended: list[str], done: asyncio.Event) -> None:
    """Release ended rollouts, as a data source does."""
    while not done.is_set():
        batch, ended[:] = list(ended), []
        await store.release(batch)
        await asyncio.sleep(0.2)


async def bare(engine: str, count: int, rounds: int) -> dict[str, Any]:
    """The least that one Python process can do for a rollout."""
    import aiohttp
    import orjson

    payload = {
        "input_ids": list(range(100, 132)),
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 64},
        "return_logprob": True,
        "rid": "r",
    }
    ends: list[float] = []
    left = iter(range(count * rounds))
    configure_worker_process()
    freeze_gc()

    async def place(session: aiohttp.ClientSession) -> None:
        for _ in left:
            body = orjson.dumps(payload)
            async with session.post(
                f"{engine}/generate", data=body, headers={"Content-Type": "application/json"}
            ) as answer:
                orjson.loads(await answer.read())
            ends.append(time.time())

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
    ) as session:
        watch = Stopwatch()
        with Peak() as peak:
            await asyncio.gather(*(place(session) for _ in range(count)))
        cpu = watch.cpu
    return {
        "rate": steady_rate(ends, count),
        "cpu_ms": 1e3 * cpu / (count * rounds),
        "kb_in_flight": 0,
        "gb": peak.bytes / 2**30,
        "load": os.getloadavg()[0],
    }


async def stock(engine: str, count: int, rounds: int) -> dict[str, Any]:
    from agentlightning import InMemoryLightningStore, LightningStoreServer

    from agl_slime.support.net import free_port

    store = InMemoryLightningStore(thread_safe=True)
    server = LightningStoreServer(store=store, host="127.0.0.1", port=free_port())
    await server.start()
    workers: list[subprocess.Popen[str]] = []
    try:
        await store.add_resources(llm_resources(engine))
        command = [sys.executable, "-m", "benchmarks.in_flight", "--case", "stock-worker", "--url", server.endpoint]
        workers = [start_worker([*command, "--count", str(n)]) for n in range(count)]
        for worker in workers:
            assert worker.stdout is not None
            line = await asyncio.to_thread(worker.stdout.readline)
            if line.strip() != "ready":
                raise RuntimeError("a stock worker did not start")
        await stock_execute(store, count)
        total = count * max(rounds, 3)
        watch, cpu_before = Stopwatch(), sum(cpu_seconds(worker.pid) for worker in workers)
        with Peak(["self", *(worker.pid for worker in workers)]) as peak:
            ends = await stock_execute(store, total)
        cpu = watch.cpu + sum(cpu_seconds(worker.pid) for worker in workers) - cpu_before
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)
        await server.stop()
    return {
        "rate": steady_rate(ends, count),
        "cpu_ms": 1e3 * cpu / total,
        "kb_in_flight": 0,
        "gb": peak.bytes / 2**30,
        "load": os.getloadavg()[0],
    }


def start_worker(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, text=True)


async def stock_execute(store: Any, count: int) -> list[float]:
    rollouts = await store.enqueue_many_rollouts(requests(count, group_size=_GROUP))
    deadline, ends = time.monotonic() + PATIENCE_S, []
    for rollout in rollouts:
        while (found := await store.get_rollout_by_id(rollout.rollout_id)).status not in (
            "succeeded",
            "failed",
            "cancelled",
        ):
            if time.monotonic() > deadline:
                raise RuntimeError("stock rollouts did not end")
            await asyncio.sleep(0.02)
        if found.status != "succeeded":
            raise RuntimeError(f"a stock rollout ended as {found.status}")
        ends.append(found.end_time)
    return ends


async def stock_worker(url: str, number: int) -> None:
    from agentlightning import LightningStoreClient, LitAgentRunner, OtelTracer

    class Client(LightningStoreClient):
        # Its OTLP exporter does not find the store with OpenTelemetry 1.45 and waits 10 s per span; without it every
        # span is a call of its own.
        @property
        def capabilities(self) -> Any:
            return {**super().capabilities, "otlp_traces": False}

    runner: LitAgentRunner[Any] = LitAgentRunner(tracer=OtelTracer(), poll_interval=0.05, interval_jitter=0.0)
    runner.init(question_agent())
    runner.init_worker(number, Client(url))
    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    print("ready", flush=True)
    await runner.iter()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
