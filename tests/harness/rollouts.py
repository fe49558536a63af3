"""Rollouts of an agent through a real runner and store."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agl_slime.data.read import failure_of
from agl_slime.runner.concurrent import RunnerSettings, RunnerThread
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, EnqueueRolloutRequest
from agl_slime.tokens.converter import Conversion, convert_rollout


@dataclass
class Finished:
    status: str
    spans: list[Any]
    rollout: Any
    failure: tuple[str, str] | None

    def convert(self, tokenizer: Any) -> Conversion:
        return convert_rollout(self.rollout, self.spans * 2, tokenizer)  # as of an exporter that delivers them twice


async def run_rollout(agent: Any, task: Mapping[str, Any]) -> Finished:
    return (await run_rollouts(agent, [task]))[0]


async def run_rollouts(
    agent: Any,
    tasks: list[Any],
    *,
    endpoint: str = "http://127.0.0.1:1",
    model: str = "none",
    resources: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> list[Finished]:
    """All ``tasks`` concurrently; the engine is the agent's client, or at ``endpoint``."""
    store = BridgeStore()
    llm = LLM(endpoint=endpoint, model=model, sampling_parameters=sampling or {"max_new_tokens": 64})
    await store.add_resources({"main_llm": llm, **(resources or {})})
    runner = RunnerSettings(poll_interval_s=0.01, heartbeat_interval_s=0, **(settings or {}))
    with RunnerThread(agent=agent, store=store, settings=runner):
        requests = [EnqueueRolloutRequest(input=task, mode="train") for task in tasks]
        results = []
        for rollout in await store.enqueue_many_rollouts(requests):
            done = await asyncio.wait_for(store.wait_for_rollout(rollout.rollout_id, timeout=50), 60)  # type: ignore[attr-defined]
            attempt = await store.get_latest_attempt(rollout.rollout_id)
            assert attempt is not None
            spans = [*await store.query_spans(rollout.rollout_id, attempt.attempt_id)]
            failure = failure_of(spans, attempt) if done.status != "succeeded" else None
            results.append(Finished(done.status, spans, done, failure))
    return results
