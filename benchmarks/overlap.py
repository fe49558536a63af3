"""Speed-up of asynchronous over synchronous training, beside the theoretical ceiling.

    python benchmarks/overlap.py [--ratios 4:1,2:1,1:1,1:2,1:4] [--staleness 1,2,4]

The loop, store, runner, agents, conversion and HTTP are real; the engine and the trainer sleep, so that they take no
CPU. The engine answers a batch of rollouts in two waves, as a full one does. The times of
rollouts, training and sync are measured in the serial run of the same ratio; ceiling = (t_roll + t_train + t_sync) /
(max(t_roll, t_train) + t_sync). Times are per iteration, without the first, which fills the pipeline.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.table import Table

from agl_slime.runner.process import configure_worker_process
from benchmarks.common import console, question, question_agent, scripted_engine, tokenizer

GROUPS, SIZE = 8, 4


class Times:
    """An observer that keeps when each iteration ended, and its metrics."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.rows: list[dict[str, Any]] = []

    def handle(self, event: Any) -> None:
        from agl_slime.events import IterationFinished

        if isinstance(event, IterationFinished):
            self.ends.append(time.monotonic())
            self.rows.append(dict(event.metrics))

    @property
    def iteration_s(self) -> float:
        return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)

    def mean(self, key: str) -> float:
        return fmean(row[key] for row in self.rows[1:])


def measure(*, roll_s: float, train_s: float, sync_s: float, staleness: int, iterations: int, spread: float) -> Times:
    """A whole run of ``iterations``; an iteration's rollouts take the engine ``roll_s``."""
    from agl_slime.data.source import GroupSource
    from agl_slime.engine.client.weights import DiskWeightSync
    from agl_slime.loop.online import OnlineRLLoop
    from agl_slime.loop.settings import LoopSettings
    from agl_slime.store.bridge import BridgeStore
    from agl_slime.support.agl import LLM

    slots = GROUPS * SIZE // 2
    latency_s = roll_s / 2
    engine = scripted_engine(latency_s=latency_s, spread_s=spread * latency_s, slots=slots, update_s=sync_s)
    times = Times()
    store = BridgeStore()
    with engine as url, GroupSource(store=store, tokenizer=tokenizer()) as source:

        def train(iteration: int) -> dict[str, float]:
            source.get_samples(GROUPS)
            time.sleep(train_s)
            return {}

        async def sync(iteration: int) -> str:
            await DiskWeightSync(base_url=url).push("scripted", str(iteration))
            return str(iteration)

        sampling = {"temperature": 1.0, "max_new_tokens": 64}
        loop = OnlineRLLoop(
            store=store,
            agent=question_agent(),
            tasks=[{"prompt": question(n)} for n in range(200)],
            llm=LLM(endpoint=url, model="scripted", sampling_parameters=sampling),
            data_source=source,
            slime_train_fn=train,
            weight_sync_fn=sync,
            settings=LoopSettings(
                num_iterations=iterations,
                rollout_batch_size=GROUPS,
                n_samples_per_prompt=SIZE,
                max_staleness=staleness,
            ),
            observer=times,
        )
        asyncio.run(loop.run_async())
        counts = source.ledger.counts()
        assert counts.opened == iterations * GROUPS * SIZE == sum(counts.closed.values()), counts
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratios", default="4:1,2:1,1:1,1:2,1:4", help="time of the engine to time of training")
    parser.add_argument("--staleness", default="1,2,4")
    parser.add_argument("--longer", type=float, default=0.8, help="seconds of the longer side")
    parser.add_argument("--sync", type=float, default=0.02, help="seconds that an update takes the engine")
    parser.add_argument("--spread", type=float, default=0.0, help="of the latencies, as a share of their mean")
    parser.add_argument("--iterations", type=int, default=9)
    options = parser.parse_args()
    configure_worker_process()  # as train.py does: a full garbage collection takes half a second
    table = Table("engine : training", "t_roll", "t_train", "t_sync", "staleness", "s per iteration", "speed-up",
                  "ceiling", "of it", "training waited", "engine waited", "behind, mean / most")  # fmt: skip
    short = 0
    for ratio in options.ratios.split(","):
        roll, train = map(float, ratio.split(":"))
        unit = options.longer / max(roll, train)
        about = {"roll_s": roll * unit, "train_s": train * unit, "sync_s": options.sync}
        about |= {"iterations": options.iterations, "spread": options.spread}
        serial = measure(staleness=0, **about)
        t_roll, t_train, t_sync = (serial.mean(f"perf/{name}_s") for name in ("collect", "train", "sync"))
        ceiling = (t_roll + t_train + t_sync) / (max(t_roll, t_train) + t_sync)
        times = [f"{t_roll:.3f}", f"{t_train:.3f}", f"{t_sync:.3f}"]
        table.add_row(ratio, *times, "0", f"{serial.iteration_s:.3f}", "1.00", f"{ceiling:.2f}")
        for staleness in map(int, options.staleness.split(",")):
            run = measure(staleness=staleness, **about)
            gained = serial.iteration_s / run.iteration_s
            short += gained < 0.9 * ceiling
            behind = f"{run.mean('rollout/staleness_mean'):.2f} / {max(r['rollout/staleness_max'] for r in run.rows)}"
            waited = [f"{run.mean(f'perf/{side}_waited'):.0%}" for side in ("trainer", "engine")]
            table.add_row("", "", "", "", str(staleness), f"{run.iteration_s:.3f}", f"{gained:.2f}",
                          f"{ceiling:.2f}", f"{gained / ceiling:.0%}", *waited, behind)  # fmt: skip
            console.print(f"{ratio} staleness {staleness}: {gained:.2f}x of {ceiling:.2f}x", style="dim")
    console.print(table)
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
