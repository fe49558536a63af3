"""Profile: where the CPU time of a rollout goes, by part and by function.

    python -m benchmarks.cpu_profile [--quick]

A whole bridge in one process (store, runner, agent, HTTP to a scripted engine, conversion, ``get_samples`` in groups of
8 with one prompt), with the interpreter's profiler on. The profiler makes small functions look dearer than they are;
shares are to be read, not milliseconds. Takes about half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import sys
import threading
import time
from typing import Any

from benchmarks.common import (
    Stopwatch,
    llm_resources,
    print_table,
    question_agent,
    quiet,
    requests,
    scripted_engine,
    tokenizer,
)

_GROUP = 8

# The first part whose words are in a function's file name owns it.
_PARTS = {
    "HTTP client (aiohttp, yarl, multidict)": ("/aiohttp/", "/yarl/", "/multidict/", "/propcache/", "/aiosignal/"),
    "agl-slime: talking to SGLang": ("/agl_slime/engine/client/",),
    "agl-slime: spans and conversion": ("/agl_slime/tokens/",),
    "agl-slime: agent, prompts": ("/agl_slime/agent/", "/agl_slime/tokenizer"),
    "agl-slime: runner": ("/agl_slime/runner/",),
    "agl-slime: store": ("/agl_slime/store",),
    "agl-slime: data source, groups": ("/agl_slime/",),
    "Agent Lightning: store": ("/agentlightning/store/",),
    "Agent Lightning: runner, emitters": ("/agentlightning/",),
    "pydantic": ("/pydantic/", "pydantic_core"),
    "templates, tokenizer": ("/jinja2/", "/transformers/", "/tokenizers/", "<template>", "tokenizers"),
    "OpenTelemetry": ("/opentelemetry/",),
    "sockets": ("_socket.socket",),
    "event loop, tasks, threads": (
        "/asyncio/",
        "/selectors.py",
        "/threading.py",
        "/queue.py",
        "_asyncio",
        "/aiologic/",
        "select.epoll",
        "/concurrent/",
        "_thread",
    ),
    "context managers, copying, JSON": (
        "/contextlib.py",
        "/copy.py",
        "/json/",
        "/weakref.py",
        "/_weakrefset.py",
        "/logging/",
        "/typing.py",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1,000 rollouts")
    parser.add_argument("--rollouts", type=int, default=4_000)
    options = parser.parse_args()
    quiet()
    count = 1_000 if options.quick else options.rollouts
    with scripted_engine(latency_s=0.2) as engine:
        plain_ms, stats = asyncio.run(measure(engine, count))
    total = sum(entry[2] for entry in stats.stats.values())  # type: ignore[attr-defined]
    parts: dict[str, float] = {}
    functions = []
    for (file, line, name), (_, calls, own, _, callers) in stats.stats.items():  # type: ignore[attr-defined]
        for part, seconds in owners(file, name, own, callers):
            parts[part] = parts.get(part, 0.0) + seconds
        functions.append((own, calls / count, f"{short(file)}{':' + str(line) if line else ''} {name}"))
    rows = [
        [part, f"{seconds / total:.1%}", f"{plain_ms * seconds / total:.3f}"]
        for part, seconds in sorted(parts.items(), key=lambda item: -item[1])
    ]
    print_table(
        f"Profile: {plain_ms:.2f} ms of CPU per rollout without the profiler, {count:,} rollouts",
        ["part", "share", "ms"],
        rows,
    )
    top = [[name, f"{own / total:.1%}", f"{calls:.1f}"] for own, calls, name in sorted(functions, reverse=True)[:10]]
    print_table("The ten dearest functions, without what they call", ["function", "share", "calls per rollout"], top)
    return 0


def owners(file: str, name: str, own: float, callers: dict[Any, Any]) -> list[tuple[str, float]]:
    """Which part a function's own time belongs to. A built-in's belongs to whoever calls it, in proportion."""
    if file != "~":
        return [(normalization_key(file), own)]
    known = normalization_key(name)
    if known != "other":
        return [(known, own)]
    times = {caller: values[2] for caller, values in callers.items()}
    whole = sum(times.values())
    if not whole:
        return [("other", own)]
    return [(normalization_key(caller[0]), own * seconds / whole) for caller, seconds in times.items()]


def normalization_key(text: str) -> str:
    return next((part for part, words in _PARTS.items() if any(word in text for word in words)), "other")


def short(file: str) -> str:
    for mark in ("site-packages/", "/lib/python3."):
        if mark in file:
            return file.split(mark, 1)[1]
    return file.rsplit("/", 2)[-1] if file != "~" else "built-in"


async def measure(engine: str, count: int) -> tuple[float, pstats.Stats]:
    from agl_slime import AGLDataSource
    from agl_slime.data.source import DataSourceSettings
    from agl_slime.runner.concurrent import RunnerSettings, RunnerThread
    from agl_slime.runner.process import configure_worker_process
    from agl_slime.store.bridge import BridgeStore

    configure_worker_process()  # as the command line does
    store = BridgeStore()
    await store.add_resources(llm_resources(engine))
    profiles: list[cProfile.Profile] = []

    def run_profiled(self: threading.Thread) -> None:
        profile = cProfile.Profile(time.thread_time)  # waiting costs nothing
        profiles.append(profile)
        profile.runcall(run, self)

    async def execute(rounds: int) -> float:
        with (
            AGLDataSource(
                store=store,
                tokenizer=tokenizer(),
                n_samples_per_prompt=_GROUP,
                settings=DataSourceSettings(get_timeout_s=600),
            ) as source,
            RunnerThread(agent=question_agent(), store=store, settings=RunnerSettings(max_concurrent=512)),
        ):
            for size in (200, rounds):
                watch = Stopwatch()
                await store.enqueue_many_rollouts(requests(size, group_size=_GROUP))
                groups = size // _GROUP
                while groups > 0:
                    groups -= len(await asyncio.to_thread(source.get_samples, groups))
                    # ids of groups may come again: they have settled
            return 1e3 * watch.cpu / rounds

    plain_ms = await execute(count)
    run = threading.Thread.run
    threading.Thread.run = run_profiled  # type: ignore[method-assign]
    try:
        await execute(count)
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]
    stats = pstats.Stats(profiles[0])
    for profile in profiles[1:]:
        stats.add(profile)
    return plain_ms, stats


if __name__ == "__main__":
    sys.exit(main())
