"""The concurrent runner over a store, with agents that are one function."""

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from agl_slime.data.read import failure_of
from agl_slime.runner.concurrent import RunnerSettings, RunnerThread
from agl_slime.store.bridge import BridgeStore
from agl_slime.support.agl import LLM, LightningStore, LitAgent, Span
from tests.harness.stores import enqueue_inputs

RESOURCES = {"main_llm": LLM(endpoint="http://127.0.0.1:1", model="none")}


class FnAgent(LitAgent[Any]):
    """Its function may be async."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self._fn = fn

    async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> Any:
        result = self._fn(task)
        return await result if inspect.isawaitable(result) else result


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


class Concurrency:
    """The most ``with`` blocks that were entered at once."""

    def __init__(self) -> None:
        self.entered = self.most = 0
        self._lock = threading.Lock()

    @contextmanager
    def counted(self) -> Iterator[None]:
        with self._lock:
            self.entered += 1
            self.most = max(self.most, self.entered)
        yield
        with self._lock:
            self.entered -= 1


def quick(**settings: Any) -> RunnerSettings:
    return RunnerSettings(**{"poll_interval_s": 0.01, "heartbeat_interval_s": 0} | settings)


@asynccontextmanager
async def running(
    agent: LitAgent[Any], store: LightningStore | None = None, *, name: str | None = None, **settings: Any
) -> AsyncIterator[BridgeStore]:
    store = store or BridgeStore()
    await store.add_resources(RESOURCES)
    with RunnerThread(agent=agent, store=store, settings=quick(**settings), name=name):
        yield store  # type: ignore[misc]


async def finished(store: LightningStore, inputs: Sequence[Any], **config: Any) -> list[Any]:
    ids = await enqueue_inputs(store, inputs, **config)
    return [await asyncio.wait_for(store.wait_for_rollout(rollout_id, timeout=20), 25) for rollout_id in ids]  # type: ignore[attr-defined]


async def spans_of(store: LightningStore, rollout: Any) -> list[Span]:
    return [*await store.query_spans(rollout.rollout_id, "latest")]


async def reason_of(store: LightningStore, rollout: Any) -> tuple[str, str]:
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None
    return failure_of(await spans_of(store, rollout), attempt)
