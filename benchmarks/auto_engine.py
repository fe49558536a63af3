"""``--max-concurrent auto`` beside fixed numbers, on the embedded engine with a real model.

    python -m benchmarks.auto_engine MODEL [--fixed 64 128 256] [--rollouts 2048] [--tokens 16]

Agents make one call, which samples ``--tokens`` tokens on average; nothing is trained. One iteration each; the rate is
measured from half a minute on, when ``auto`` should have converged, until too few rollouts are left to fill the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from dataclasses import replace
from statistics import median
from typing import Any

from agl_slime import SGLangLitAgent
from agl_slime.agent.session import RolloutSession
from agl_slime.data.source import GroupSource
from agl_slime.engine.client.load import EngineLoads
from agl_slime.engine.process import EmbeddedEngine
from agl_slime.events import IterationFinished, RolloutFinished
from agl_slime.loop import auto_concurrency
from agl_slime.loop.online import OnlineRLLoop
from agl_slime.loop.settings import LoopSettings
from agl_slime.metric_names import IN_FLIGHT_LIMIT
from agl_slime.runner.base import RunnerPlan, RunnerSettings
from agl_slime.runner.process import configure_worker_process
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM
from agl_slime.tokens.loading import load_tokenizer
from benchmarks.common import load, quiet

_SIZE = 8
_FOUND_S = 30.0


class Asks(SGLangLitAgent):
    """Answers of random length, so that they do not start and end together."""

    async def run(self, task: dict[str, Any], session: RolloutSession) -> None:
        most = random.randint(1, 2 * session.sampling.max_new_tokens - 1)
        await session.ask(sampling=replace(session.sampling, max_new_tokens=most))

    def compute_reward(self, task: Any, response: str) -> float:
        return 0.0


class Ends:
    """When rollouts ended, and their tokens; and the limit as the iteration ended. ``most``: of all fixed numbers."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.seen: list[tuple[float, int]] = []
        self.limit: Any = None

    def handle(self, event: Any) -> None:
        if isinstance(event, RolloutFinished):
            assert event.outcome != "failed", event
            self.seen.append((event.at, event.tokens))
        elif isinstance(event, IterationFinished):
            self.limit = event.metrics.get(IN_FLIGHT_LIMIT)

    def rate(self) -> float:
        """Tokens per second from half a minute on, until the engine begins to empty."""
        begun = self.seen[0][0] + _FOUND_S
        kept = [one for one in self.seen[: -self.most] if one[0] >= begun]
        assert len(kept) > 1, f"it is over before {_FOUND_S:g} s: give more --rollouts"
        return sum(tokens for _, tokens in kept[1:]) / (kept[-1][0] - kept[0][0])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--fixed", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument("--rollouts", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    configure_worker_process()
    quiet()
    rates: dict[str, list[float]] = {str(limit): [] for limit in (*options.fixed, "auto")}
    limits: list[Any] = []
    for _ in range(options.rounds):
        for limit in rates:
            with EmbeddedEngine(options.model) as engine:
                rate, last = asyncio.run(measured(engine.url, limit, options))
            rates[limit].append(rate)
            limits += [last] if limit == "auto" else []
            print(f"… {limit}: {rate:.0f} tokens/s", file=sys.stderr, flush=True)
    best = max(median(rates[str(limit)]) for limit in options.fixed)
    print(f"\n{options.rollouts} rollouts of {options.tokens} tokens ({load()}); auto ended at {limits}:\n")
    print("| in flight | tokens/s | of the best fixed number |\n| --- | ---: | ---: |")
    for limit, found in rates.items():
        print(f"| {limit} | {median(found):.0f} | {median(found) / best:.2f} |")
    return 0


async def measured(url: str, limit: str, options: argparse.Namespace) -> tuple[float, Any]:
    """The rate, and the limit at the end."""
    store, ends = BridgeStore(), Ends(max(options.fixed))
    tokenizer = load_tokenizer(options.model)
    most = auto_concurrency.MOST if limit == "auto" else int(limit)
    sampling = {"temperature": 1.0, "max_new_tokens": options.tokens, "ignore_eos": True}
    with GroupSource(store=store, tokenizer=tokenizer) as source:
        groups = options.rollouts // _SIZE

        def train(iteration: int) -> dict[str, float]:
            source.get_samples(groups)
            return {}

        async def sync(iteration: int) -> str:
            return "default"

        loop = OnlineRLLoop(
            store=store,
            agent=Asks(tokenizer=tokenizer),
            tasks=[{"prompt": f"Tell a story about {n} cats."} for n in range(groups)],
            llm=LLM(endpoint=url, model=options.model, sampling_parameters=sampling),
            data_source=source,
            slime_train_fn=train,
            weight_sync_fn=sync,
            engine_loads=EngineLoads(url) if limit == "auto" else None,
            settings=LoopSettings(num_iterations=1, rollout_batch_size=groups, n_samples_per_prompt=_SIZE),
            runners=RunnerPlan(settings=RunnerSettings(max_concurrent=most)),
            observer=ends,
        )
        await loop.run_async()
    return ends.rate(), ends.limit


if __name__ == "__main__":
    sys.exit(main())
