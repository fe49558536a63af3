"""Latency: from the moment a rollout has finished until its group can be taken with ``get_samples``.

    python -m benchmarks.latency [--quick]

Measured with 1,000, 10,000 and 100,000 rollouts already in the store (none of them released, which is the worst case),
on an idle bridge and while 512 other rollouts are in flight. Beside it the design that asks the store every 5 s for
finished rollouts: half the interval on average, plus the query, which walks everything stored; the query is measured
here, the interval is arithmetic. Takes about 3 minutes; ``--quick`` half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from typing import Any

from benchmarks.common import console, load, percentile, print_table, quiet, slope

_POLL_S = 5.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="up to 10,000 stored, 100 groups each")
    parser.add_argument("--groups", type=int, default=400, help="groups per line of the table")
    options = parser.parse_args()
    quiet()
    sizes = (1_000, 10_000) if options.quick else (1_000, 10_000, 100_000)
    groups = 100 if options.quick else options.groups
    results = asyncio.run(measure(sizes, groups))
    rows = []
    for stored, busy, taken_s, query_s in results:
        polled_p50, polled_p99 = _POLL_S * 0.5 + query_s, _POLL_S * 0.99 + query_s
        p50, p99 = percentile(taken_s, 50), percentile(taken_s, 99)
        rows.append(
            [
                f"{stored:,}{', 512 in flight' if busy else ''}",
                f"{1e3 * p50:.2f}",
                f"{1e3 * p99:.2f}",
                f"{1e3 * query_s:.0f}",
                f"{1e3 * polled_p50:.0f}",
                f"{1e3 * polled_p99:.0f}",
                f"{polled_p50 / p50:,.0f}x",
            ]
        )
    idle = [(stored / 1_000, 1e3 * percentile(taken, 50)) for stored, busy, taken, _ in results if not busy]
    idle99 = [(stored / 1_000, 1e3 * percentile(taken, 99)) for stored, busy, taken, _ in results if not busy]
    print_table(
        f"Latency: finished to available, {groups} groups each",
        [
            "rollouts in the store",
            "p50 ms",
            "p99 ms",
            "query ms",
            "5 s polling p50 ms",
            "5 s polling p99 ms",
            "polling / ours",
        ],
        rows,
        notes=[f"Growth per 1,000 stored rollouts: p50 {slope(idle):+.4f} ms, p99 {slope(idle99):+.4f} ms."],
    )
    return 0


async def measure(sizes: tuple[int, ...], groups: int) -> list[tuple[int, bool, list[float], float]]:
    from agl_slime import AGLDataSource
    from agl_slime.data.source import DataSourceSettings
    from agl_slime.runner.concurrent import RunnerSettings, RunnerThread
    from agl_slime.runner.process import configure_worker_process
    from agl_slime.store.bridge import BridgeStore, Retention
    from agl_slime.support.agl import LLM
    from benchmarks.work import TurnAgent

    configure_worker_process()  # as the command line does
    store = BridgeStore(retention=Retention(released_rollouts=10**9, released_bytes=2**50))  # keeps everything
    await store.add_resources({"main_llm": LLM(endpoint="http://127.0.0.1:1", model="none")})
    results = []
    with (
        AGLDataSource(store=store, n_samples_per_prompt=1, settings=DataSourceSettings(get_timeout_s=600)) as source,
        RunnerThread(
            agent=TurnAgent(), store=store, settings=RunnerSettings(max_concurrent=2_048, poll_interval_s=0.01)
        ),
    ):
        for stored in sizes:
            await fill(store, source, stored)
            console.print(f"{stored:,} stored … ({load()})", highlight=False)
            for busy in (False, True):
                stop = threading.Event()
                company = asyncio.create_task(keep_busy(store, stop)) if busy else None
                taken = await asyncio.to_thread(take_groups, store, source, groups)
                stop.set()
                if company is not None:
                    await company
                began = time.perf_counter()
                await store.query_rollouts(status_in=["succeeded", "failed", "cancelled"])
                results.append((stored, busy, taken, time.perf_counter() - began))
    return results


async def fill(store: Any, source: Any, stored: int) -> None:
    """Execute rollouts, and take their groups, until ``stored`` are in the store."""
    while (missing := stored - store.usage().stored) > 0:
        batch = min(missing, 5_000)
        await store.enqueue_many_rollouts(work(batch))
        while batch > 0:
            batch -= len(await asyncio.to_thread(source.get_samples, min(batch, 500)))


def work(count: int, **task: Any) -> list[Any]:
    from agl_slime.support.agl import EnqueueRolloutRequest

    return [EnqueueRolloutRequest(input=task, mode="train") for _ in range(count)]


def take_groups(store: Any, source: Any, groups: int) -> list[float]:
    """Seconds from the end of a rollout in the store until ``get_samples`` has returned its group, one after the
    other."""
    taken = []
    for _ in range(groups):
        asyncio.run(store.enqueue_many_rollouts(work(1)))
        [[sample]] = source.get_samples(1)
        now = time.time()
        rollout = asyncio.run(store.get_rollout_by_id(sample.metadata["agl_rollout_id"]))
        taken.append(now - rollout.end_time)
    return taken


async def keep_busy(store: Any, stop: threading.Event) -> None:
    """512 rollouts in flight that take 4 s each, 128 per second, in validation mode: they are executed and read, and
    give no samples."""
    while not stop.is_set():
        for request in (requests := work(16, wait_s=4.0)):
            request.mode = "val"
        await store.enqueue_many_rollouts(requests)
        await asyncio.sleep(0.125)


if __name__ == "__main__":
    sys.exit(main())
