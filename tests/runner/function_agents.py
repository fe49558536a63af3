"""The concurrent runner over a store, with agents that are one function."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from agl_slime.data.read import failure_of
from agl_slime.runner.concurrent import RunnerSettings
from agl_slime.runner.thread import RunnerThread
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, LightningStore, LitAgent
from tests.harness.stores import enqueue_inputs

RESOURCES = {"main_llm": LLM(endpoint="http://127.0.0.1:1", model="none")}


class FnAgent(LitAgent[Any]):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self._fn = fn

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
        return await self._fn(task)


class SyncFnAgent(LitAgent[Any]):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self._fn = fn

    def rollout(self, task: Any, resources: Any, rollout: Any) -> Any:
        return self._fn(task)


class ClaimCounter(BridgeStore):
    """``limits`` of all requests for rollouts."""

    def __init__(self) -> None:
        super().__init__()
        self.limits: list[int] = []

    async def dequeue_many_rollouts(self, *, limit: int = 1, worker_id: str | None = None) -> Any:
        self.limits.append(limit)
        return await super().dequeue_many_rollouts(limit=limit, worker_id=worker_id)


@asynccontextmanager
async def running(
    agent: LitAgent[Any], store: LightningStore | None = None, **settings: Any
) -> AsyncIterator[BridgeStore]:
    store = store or BridgeStore()
    await store.add_resources(RESOURCES)
    with RunnerThread(
        agent=agent, store=store, settings=RunnerSettings(poll_interval_s=0.01, heartbeat_interval_s=0, **settings)
    ):
        yield store  # type: ignore[misc]


async def finished(store: LightningStore, inputs: Sequence[Any], **config: Any) -> list[Any]:
    ids = await enqueue_inputs(store, inputs, **config)
    return [await asyncio.wait_for(store.wait_for_rollout(rollout_id, timeout=20), 25) for rollout_id in ids]  # type: ignore[attr-defined]


async def reason_of(store: LightningStore, rollout: Any) -> tuple[str, str]:
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    spans = [*await store.query_spans(rollout.rollout_id, attempt.attempt_id)]
    return failure_of(spans, attempt_status=attempt.status)
