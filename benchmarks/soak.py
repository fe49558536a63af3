"""Soak: 200,000 short rollouts through the whole bridge in one process; does memory stay, does the rate stay?

    python -m benchmarks.soak [--quick]

Each rollout records one turn of 64 tokens without an engine, is read, converted and taken with ``get_samples`` in
groups of 8. Resident memory is taken after each tenth. The goals: memory at the end within 10 % of that after the first
tenth, and at least 95 % of its rate in the last. Takes about 5 minutes on an idle machine; ``--quick`` (20,000
rollouts) half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from typing import Any

from benchmarks.common import load, print_table, quiet, resident_bytes, settle_memory

_GROUP = 8
_WAVE = 1_000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20,000 rollouts")
    parser.add_argument("--rollouts", type=int, default=200_000)
    options = parser.parse_args()
    quiet()
    count = 20_000 if options.quick else options.rollouts
    tenths = asyncio.run(measure(count))
    first, last = tenths[0], tenths[-1]
    rows = [
        [
            f"{done:,}",
            f"{count / 10 / seconds:.0f}",
            f"{1e3 * cpu * 10 / count:.3f}",
            f"{memory / 2**20:.0f}",
            f"{stored:,}",
            where,
        ]
        for done, seconds, cpu, memory, stored, where in tenths
    ]
    rate, cpu_rate, memory = first[1] / last[1], first[2] / last[2], last[3] / first[3]
    print_table(
        f"Soak: {count:,} rollouts",
        ["rollouts", "rollouts/s", "CPU ms", "RSS MB", "in the store", "load"],
        rows,
        notes=[
            f"Last tenth against first: memory {memory:.1%} (goal at most 110%), "
            f"rollouts/s {rate:.1%} (goal at least 95%), "
            f"rollouts per CPU second {cpu_rate:.1%}, which the load of the machine does not touch as much."
        ],
    )
    return 0


async def measure(count: int) -> list[tuple[int, float, float, int, int, str]]:
    from agl_slime import AGLDataSource
    from agl_slime.data.source import DataSourceSettings
    from agl_slime.runner.concurrent import RunnerSettings, RunnerThread
    from agl_slime.runner.process import configure_worker_process
    from agl_slime.store.bridge import BridgeStore
    from agl_slime.support.agl import LLM
    from benchmarks.common import requests
    from benchmarks.work import TurnAgent

    configure_worker_process()  # as the command line does
    store = BridgeStore()
    await store.add_resources({"main_llm": LLM(endpoint="http://127.0.0.1:1", model="none")})
    tenths = []
    with (
        AGLDataSource(
            store=store, n_samples_per_prompt=_GROUP, settings=DataSourceSettings(get_timeout_s=600)
        ) as source,
        RunnerThread(
            agent=TurnAgent(), store=store, settings=RunnerSettings(max_concurrent=512, poll_interval_s=0.01)
        ) as runner,
    ):
        wave_number = 0
        for tenth in range(10):
            began, cpu = time.monotonic(), time.process_time()
            left = count // 10
            while left > 0:
                wave = min(_WAVE, left)
                left -= wave
                await enqueue(store, runner, wave, wave_number, requests)
                wave_number += 1
                groups = wave // _GROUP
                while groups > 0:
                    groups -= len(await asyncio.to_thread(source.get_samples, groups))
            seconds, cpu = time.monotonic() - began, time.process_time() - cpu
            settle_memory()
            tenths.append(
                (
                    (tenth + 1) * count // 10,
                    seconds,
                    cpu,
                    resident_bytes(),
                    store.usage().stored,
                    load().split(",")[0].split()[-1],
                )
            )
    return tenths


async def enqueue(store: Any, runner: Any, wave: int, number: int, requests: Any) -> None:
    batch = requests(wave, group_size=_GROUP)
    for request in batch:  # a group id is used once
        request.metadata["group_id"] = f"{number}-{request.metadata['group_id']}"
    await store.enqueue_many_rollouts(batch)
    runner.wake()


if __name__ == "__main__":
    sys.exit(main())
