"""Attribution: 10,000 rollouts at once with nested tasks, threads and executors; does every span and every reward land
on its own rollout?

    python -m benchmarks.attribution [--quick]

Each rollout makes a span in a nested task, in ``asyncio.to_thread``, in ``run_in_executor``, in a thread of its own and
in the agent itself, and emits a reward that no other has. All finish in random order. Takes about a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import threading
from typing import Any

from benchmarks.common import PATIENCE_S, Countdown, Stopwatch, print_table, quiet

PLACES = ("agent", "task", "to_thread", "executor", "thread")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1,000 rollouts")
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--in-flight", type=int, default=1_024)
    options = parser.parse_args()
    quiet()
    count = 1_000 if options.quick else options.rollouts
    rows, wrong = asyncio.run(measure(count, options.in_flight))
    print_table(
        f"Attribution: {count:,} rollouts, {options.in_flight:,} in flight",
        ["made in", "spans", "on the wrong rollout", "missing"],
        rows,
    )
    return 1 if wrong else 0


async def measure(count: int, in_flight: int) -> tuple[list[list[str]], int]:
    from opentelemetry import trace

    from agl_slime.runner.concurrent import RunnerSettings, RunnerThread
    from agl_slime.runner.process import configure_worker_process
    from agl_slime.store.bridge import BridgeStore
    from agl_slime.support.agl import LLM, EnqueueRolloutRequest, LitAgent, emit_reward, find_final_reward

    configure_worker_process()  # as the command line does
    tracer = trace.get_tracer("benchmark")

    def span(place: str, number: int) -> None:
        tracer.start_span(place, attributes={"number": number}).end()

    class Agent(LitAgent[Any]):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> None:
            number = task["n"]
            rng = random.Random(number)

            async def nested() -> None:
                await asyncio.sleep(rng.random() * 0.05)
                span("task", number)

            child = asyncio.create_task(nested())
            await asyncio.sleep(rng.random() * 0.05)
            await asyncio.to_thread(span, "to_thread", number)
            await asyncio.get_running_loop().run_in_executor(None, span, "executor", number)
            thread = threading.Thread(target=span, args=("thread", number))
            thread.start()
            await child
            while thread.is_alive():  # noqa: ASYNC110  joining would block the loop
                await asyncio.sleep(0.001)
            span("agent", number)
            emit_reward(float(number))

    store = BridgeStore()
    await store.add_resources({"main_llm": LLM(endpoint="http://127.0.0.1:1", model="none")})
    left = Countdown(count)
    store.subscribe_finished(left.down)
    watch = Stopwatch()
    with RunnerThread(agent=Agent(), store=store, settings=RunnerSettings(max_concurrent=in_flight)):
        rollouts = await store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input={"n": n}, mode="train") for n in range(count)]
        )
        await left.wait(PATIENCE_S)
    made = dict.fromkeys((*PLACES, "reward"), 0)
    wrong = dict.fromkeys(made, 0)
    for rollout in rollouts:
        number = rollout.input["n"]
        spans = [*await store.query_spans(rollout.rollout_id, "latest")]
        for found in spans:
            if found.name in made:
                made[found.name] += 1
                wrong[found.name] += found.attributes["number"] != number
        reward = find_final_reward(spans)
        made["reward"] += reward is not None
        wrong["reward"] += reward is not None and reward != number
    rows = [[place, f"{made[place]:,}", str(wrong[place]), str(count - made[place])] for place in made]
    rows.append(
        [
            f"({count / watch.wall:.0f} rollouts/s)",
            f"{sum(made.values()):,}",
            str(sum(wrong.values())),
            str(6 * count - sum(made.values())),
        ]
    )
    return rows, sum(wrong.values()) + 6 * count - sum(made.values())


if __name__ == "__main__":
    sys.exit(main())
